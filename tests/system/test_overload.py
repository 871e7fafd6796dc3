"""A service that is full says so at once, over the wire, and recovers."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import grpc
import pytest
from served import server, tokens
from test_exactness import PROMPTS
from test_served import request

from deploy.settings import demo_config

pytestmark = [pytest.mark.ray, pytest.mark.ci, pytest.mark.timeout(300)]


async def test_a_full_service_queues_some_and_refuses_the_rest_at_once_and_says_when_to_come_back():
    config = demo_config()
    config = replace(config, draft=None, limits=replace(config.limits, max_sessions=2, max_queued=1, max_priority=-1))
    with server(config) as running:
        async with running.channel() as channel:
            stub = running.stub(channel)
            streams = [stub.GenerateStream(request(PROMPTS[0], 1000)) for _ in range(2)]
            for stream in streams:
                await stream.read()
            waiting = asyncio.ensure_future(tokens(stub, request(PROMPTS[0], 4)))
            await asyncio.sleep(1.0)  # it is to be the one in the queue
            error = await refusal(stub)
            told = r"all 2 places are taken and 1 requests wait for one; try again in [0-9.]+ s"
            assert re.search(told, error.details()), "by how far the streams are"
            assert not waiting.done()
            urgent = asyncio.ensure_future(tokens(stub, request(PROMPTS[0], 4, priority=-1)))
            with pytest.raises(grpc.aio.AioRpcError, match="places are taken"):
                await waiting
            waiting = urgent
            streams[0].cancel()
            assert len(await waiting) == 4, "it has the place that was left"
            streams[1].cancel()
            await assert_nothing_is_held_by_target(running)
            assert len(await tokens(stub, request(PROMPTS[0], 4))) == 4


async def refusal(stub):
    """The error of a call that finds the queue full; a call that comes before it is full gives up in time."""
    for _ in range(60):
        try:
            await stub.Generate(request(PROMPTS[0], 4), timeout=0.5)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return error
    pytest.fail("the queue is never full")


async def assert_nothing_is_held_by_target(running):
    for _ in range(1000):
        if (await running.stats("target")).num_sessions == 0:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the target still holds a session")
