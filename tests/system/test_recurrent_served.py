"""Targets with recurrent layers on a real cluster: drafting and deaths change no token, by gRPC and by HTTP."""

from __future__ import annotations

import json
import urllib.request

import pytest
from served import deployed_for

from bench.harness.victims import kill_engine
from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from outrider_client import Client
from tests.checkpoints import VOCAB_SIZE, write

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "the state of a row follows that of the row before"
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}]
NUM_LONG = 1000
SIZES = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}


@pytest.fixture(scope="module", params=["dense", "recurrent"])
def draft(request):
    return request.param


@pytest.fixture(scope="module")
def served(cluster, draft, tmp_path_factory):
    """A dense draft, whose guesses are mostly wrong; or one that is the target, whose guesses are mostly right."""
    folder = tmp_path_factory.mktemp(draft)
    target = write("qwen3_next", folder / "target", **SIZES)
    guesser = write("llama", folder / "draft", seed=2, **SIZES) if draft == "dense" else target
    engines = [EngineConfig(str(path)) for path in (target, guesser)]
    speculation = SpeculationConfig(policy="static_tree", max_draft_tokens=4, draft_timeout_s=30.0, draft_retry_s=0.5)
    config = ServiceConfig(TargetConfig(engines[0]), DraftConfig(engines[1]), speculation=speculation)
    with deployed_for(config, cluster) as server:
        yield server


@pytest.fixture
def client(served):
    with Client(served.address) as client:
        yield client


def by_grpc(client, max_tokens=48, **fields):
    return client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, **fields)


def by_http(cluster, **fields):
    body = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, **fields}
    call = urllib.request.Request(
        f"http://localhost:{cluster.http_port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=60) as reply:
        return json.loads(reply.read())["choices"][0]["text"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafting_changes_no_token(cluster, client, sampling):
    plain = by_grpc(client, max_draft_tokens=0, **sampling)
    assert by_grpc(client, **sampling).token_ids == plain.token_ids
    undrafted = by_http(cluster, speculation={"max_draft_tokens": 0}, **sampling)
    assert by_http(cluster, **sampling) == undrafted == plain.text


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_death_changes_no_token(client, sampling, role):
    plain = by_grpc(client, NUM_LONG, max_draft_tokens=0, **sampling)
    stream = client.stream(PROMPT, max_tokens=NUM_LONG, ignore_eos=True, **sampling)
    tokens = [*next(stream).token_ids]
    await kill_engine(role)
    for chunk in stream:
        tokens += chunk.token_ids
    assert tuple(tokens) == plain.token_ids
    assert role == "draft" or chunk.finish.speculation.target_failures > 0
