"""Adapters on a real cluster: loaded and unloaded while streams run, over two target replicas, one of which dies."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from local import DEMO
from served import MAX_TRIES, deployed_for

from bench.harness.victims import kill_engine
from deploy.settings import demo_config
from outrider_client import Client, NotFound
from tests.adapters import write_adapter

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = "def read_lines(path):\n"
MAX_WAIT_S = 30.0


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def served(cluster, root):
    started = write_adapter(root / "started", DEMO / "target", 1, lora_alpha=0.4)
    config = demo_config(["target.num_replicas=2", "http.load_adapters=true", "speculation.policy=static"])
    engine = replace(config.target.engine, adapters={"started": str(started)}, max_adapters=2)
    config = replace(config, target=replace(config.target, engine=engine))
    with deployed_for(config, cluster) as server:
        yield server


@pytest.fixture
def client(served):
    with Client(served.address) as client:
        yield client


def post(cluster, path, **fields):
    """The status and the text of the reply."""
    body = json.dumps(fields).encode()
    call = urllib.request.Request(f"http://localhost:{cluster.http_port}/v1/{path}", body)
    try:
        with urllib.request.urlopen(call, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def load(cluster, name, path):
    return post(cluster, "load_lora_adapter", lora_name=name, lora_path=str(path))


def load_in_time(cluster, name, path):
    """Load it as soon as there is a place."""
    deadline_s = time.monotonic() + MAX_WAIT_S
    while (outcome := load(cluster, name, path))[0] != 200:
        assert "2 adapters are loaded, which is max_adapters" in outcome[1]
        assert time.monotonic() < deadline_s, "nothing was dropped"
        time.sleep(0.2)


def complete(client, model, num_tokens=32, **fields):
    return client.generate(PROMPT, model=model, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **fields)


def until_unknown(client, model):
    deadline_s = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < deadline_s:
        try:
            complete(client, model, 1)
        except NotFound:
            return
        time.sleep(0.1)
    pytest.fail(f"{model} is still known")


def test_an_adapter_of_the_settings_is_listed_and_used(client):
    assert [(each.name, each.adapter_of) for each in client.list_models()][:2] == [
        ("outrider-demo", ""),
        ("started", "outrider-demo"),
    ]
    for _ in range(MAX_TRIES):
        adapted = complete(client, "started")
        if adapted.finish.speculation.drafted_tokens:
            break
    assert adapted.token_ids != complete(client, "outrider-demo").token_ids
    assert adapted.token_ids == complete(client, "started", max_draft_tokens=0).token_ids
    assert adapted.finish.speculation.drafted_tokens > 0
    with pytest.raises(NotFound, match="there is no model 'other' here; this server has 'outrider-demo', 'started'"):
        complete(client, "other")


def test_adapters_are_loaded_and_unloaded_while_streams_run(cluster, client, root):
    path = write_adapter(root / "late", DEMO / "target", 2, lora_alpha=0.4)
    running = client.stream(PROMPT, model="started", max_tokens=300, temperature=0.0, ignore_eos=True)
    first = next(running)
    assert load(cluster, "late", path) == (200, "Success: LoRA adapter 'late' added successfully.")
    outputs = {complete(client, "late").token_ids for _ in range(6)}
    assert len(outputs) == 1, "on either replica"
    stream = client.stream(PROMPT, model="late", max_tokens=300, temperature=0.0, ignore_eos=True)
    chunks = [next(stream)]
    assert post(cluster, "unload_lora_adapter", lora_name="late")[0] == 200
    until_unknown(client, "late")
    tokens = [token for chunk in [*chunks, *stream] for token in chunk.token_ids]
    assert len(tokens) == 300, "a stream that has begun goes on"
    assert tuple(tokens[:32]) in outputs
    assert sum(len(chunk.token_ids) for chunk in [first, *running]) == 300


def test_an_adapter_that_cannot_be_served_is_refused_and_others_go_on(cluster, client, root):
    path = write_adapter(root / "bad", DEMO / "target", 3, use_dora=True)
    status, text = load(cluster, "bad", path)
    assert status == 400
    assert "use_dora is True; only plain LoRA is served" in text
    assert load(cluster, "none", root / "none")[0] == 400
    assert len(complete(client, "started").token_ids) == 32


async def test_a_stream_whose_target_dies_goes_on_with_its_adapter(cluster, client, root):
    """The other replica, or the engine that replaces the dead one, is asked to load it, where the one that was unloaded
    before has left a place."""
    path = write_adapter(root / "mine", DEMO / "target", 4, lora_alpha=0.4)
    await asyncio.to_thread(load_in_time, cluster, "mine", path)
    want = await asyncio.to_thread(complete, client, "mine", 400)
    stream = client.stream(PROMPT, model="mine", max_tokens=400, temperature=0.0, ignore_eos=True)
    tokens = list((await asyncio.to_thread(next, stream)).token_ids)
    await kill_engine("target")
    rest = await asyncio.to_thread(list, stream)
    tokens += [token for chunk in rest for token in chunk.token_ids]
    assert tuple(tokens) == want.token_ids
    assert rest[-1].finish.speculation.target_failures > 0
