"""Whatever is sent is answered or refused by name: no INTERNAL, no UNKNOWN, and no exception that comes out."""

from __future__ import annotations

from random import Random

import grpc
import pytest

from tests.deploy.grpc.fuzz import ALLOWED, fuzz, mutated, odd_calls
from tests.deploy.grpc.rpc import Script, greeting, server

SHORT = {"num_structured": 1000, "num_mutated": 2000, "num_bodies": 1000}
LONG = {"num_structured": 100_000, "num_mutated": 1_000_000, "num_bodies": 100_000}


@pytest.mark.parametrize("num", [SHORT, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_odd_requests_are_answered_or_refused_by_name(num):
    target = await fuzz(20261125, **num)
    assert target.faults == []
    assert target.told.total() == sum(num.values())
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", 200, 400} <= set(target.told)


@pytest.mark.parametrize("num_calls", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_so_they_are_over_sockets_and_the_next_call_is_served(num_calls):
    random = Random(3)
    calls = list(odd_calls(random, num_calls))
    with server(Script(*greeting()[1:])) as address, grpc.insecure_channel(address) as channel:
        for index, (name, data) in enumerate(calls):
            sent = data if index % 2 else mutated(random, data, calls[index - 1][1])
            assert told(channel, name, sent) in ALLOWED, (name, sent)
        assert told(channel, "Generate", b"\x12\x03say") == "OK"


def told(channel, name, data):
    """The status of a call; all methods can be called as streams."""
    call = channel.unary_stream(f"/outrider.v1.GenerationService/{name}")
    try:
        for _ in call(data, timeout=30):
            pass
    except grpc.RpcError as error:
        return error.code().name
    return "OK"
