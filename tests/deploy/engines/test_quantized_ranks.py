"""Ranks that share quantized weights: a rank that dies changes no token."""

from __future__ import annotations

import os
import signal

import pytest

from deploy.launch.local import served
from deploy.settings import DEMO_DIRECTORY, demo_config
from outrider import LLM
from outrider_client import Client
from tests.deploy.engines.test_ranks import PROMPT, SETTINGS, TEMPERATURES, complete, fields, followers
from tests.quantized import quantize

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 400


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    scaled, _ = quantize("FP8 blocks", DEMO_DIRECTORY / "target", tmp_path_factory.mktemp("quantized"))
    return scaled


@pytest.fixture(scope="module")
def alone(target):
    """The reply of one process."""
    with LLM(target, progress=False) as llm:
        return {each: llm.generate(PROMPT, **fields(each, 48))[0].token_ids for each in TEMPERATURES}


@pytest.fixture(scope="module")
def client(alone, target):
    config = demo_config([*SETTINGS, f"target.engine.model={target}", "target.engine.tensor_parallel=2"])
    with served(config, lambda _: None) as endpoints, Client(f"localhost:{endpoints.grpc_port}") as client:
        yield client


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_rank_that_dies_changes_no_token(client, alone, temperature):
    assert complete(client, temperature) == alone[temperature]
    expected = complete(client, temperature, num_tokens=NUM_TOKENS)
    [follower] = followers()
    stream = client.stream(PROMPT, **fields(temperature, NUM_TOKENS))
    tokens = [*next(stream).token_ids]
    os.kill(follower, signal.SIGKILL)
    for chunk in stream:
        tokens += chunk.token_ids
    assert tuple(tokens) == expected
    assert chunk.finish.speculation.target_failures > 0
