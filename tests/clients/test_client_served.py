"""The real system: orchestrators are killed in the middle of streams, and nobody who reads one can tell."""

from __future__ import annotations

import asyncio
import time

import pytest

from deploy.settings import demo_config
from outrider_client import AsyncClient, Client, InvalidRequest
from tests.system.served import server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["def read_lines(path):", "class Stack:", "import os\n", "x = '안녕"]
FIELDS = {"max_tokens": 200, "temperature": 0.9, "ignore_eos": True, "timeout_s": 120.0}


@pytest.fixture(scope="module")
def running():
    with server(demo_config(["orchestrator.num_replicas=2"])) as running:
        yield running


def orchestrators():
    """The replica actors that live now."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    return [
        ray.get_actor(actor["name"], namespace="serve")
        for actor in named
        if actor["namespace"] == "serve" and actor["name"].startswith("SERVE_REPLICA::outrider#orchestrator#")
    ]


def kill(replicas):
    import ray

    for replica in replicas:
        ray.kill(replica)


async def both_are_up(deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while len(orchestrators()) < 2:
        assert time.monotonic() < end, "Serve has not replaced a dead replica"
        await asyncio.sleep(0.2)


async def read(client, prompt, events, num_chunks=5):
    """The text and ids of a stream; the event is set once some of it has come."""
    text, ids = "", []
    async with client.stream(prompt, **FIELDS) as stream:
        async for chunk in stream:
            text, ids = text + chunk.text, ids + list(chunk.token_ids)
            num_chunks -= 1
            if num_chunks == 0:
                events[prompt].set()
        return text, tuple(ids), chunk.finish.seed, stream.num_calls


async def undisturbed(client, prompt, seed):
    again = await client.generate(prompt, seed=seed, **FIELDS)
    assert again.num_calls == 1
    return again.text, again.token_ids


async def test_streams_go_on_when_an_orchestrator_dies_and_are_those_that_none_disturbed(running):
    async with AsyncClient(running.address) as client:
        num_calls = 0
        for replica in (0, 1):
            await both_are_up()
            events = {prompt: asyncio.Event() for prompt in PROMPTS}
            streams = [asyncio.ensure_future(read(client, prompt, events)) for prompt in PROMPTS]
            await asyncio.gather(*(event.wait() for event in events.values()))
            kill(orchestrators()[replica : replica + 1])
            for prompt, stream in zip(PROMPTS, await asyncio.gather(*streams), strict=True):
                text, ids, seed, calls = stream
                num_calls += calls
                assert (text, ids) == await undisturbed(client, prompt, seed), prompt
        assert num_calls > 2 * len(PROMPTS), "no stream was disturbed"


async def test_a_stream_waits_for_an_orchestrator_when_all_are_dead(running):
    await both_are_up()

    def read_blocking():
        with Client(running.address) as client:
            chunks = []
            with client.stream(PROMPTS[0], seed=3, **FIELDS) as stream:
                for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == 5:
                        kill(orchestrators())
            return "".join(chunk.text for chunk in chunks), sum((chunk.token_ids for chunk in chunks), ()), stream

    text, ids, stream = await asyncio.to_thread(read_blocking)
    assert stream.num_calls > 1
    async with AsyncClient(running.address) as client:
        assert (text, ids) == await undisturbed(client, PROMPTS[0], 3)


async def test_serve_passes_the_field_of_a_refusal_on(running):
    async with AsyncClient(running.address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("x", temperature=-1.0)
        assert caught.value.field == "sampling.temperature"
        with pytest.raises(InvalidRequest) as caught:
            await client.detokenize([2**31])
        assert caught.value.field == "token_ids[0]"
        info = await client.model_info()
        assert await client.detokenize(await client.tokenize("a b", add_special_tokens=False)) == "a b"
        assert (info.model, info.verification) == ("outrider-demo", "coupled")
