"""Deadlines that are kept in the proxy: the caller hears at once, and the call ends by itself."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math

import pytest

from core.errors import DeadlinePassed
from deploy.grpc import proxy_deadline
from deploy.grpc.proxy_deadline import timeout_of, with_deadline
from protos.outrider.v1 import generation_pb2 as pb
from simulation.clock import run

HASTY = pb.GenerateRequest(timeout_s=0.05).SerializeToString()
PATIENT = pb.GenerateRequest(timeout_s=3600).SerializeToString()
WITHOUT = pb.GenerateRequest(text="a").SerializeToString()


class FakeCall:
    """The server behind the proxy: a first reply at once, a second when told; notes how it ended."""

    def __init__(self):
        self.goes_on = asyncio.Event()
        self.ended = asyncio.Event()
        self.end = ""

    async def unary(self, message, context):
        try:
            await self.goes_on.wait()
            self.end = "by itself"
        except asyncio.CancelledError:
            self.end = "cancelled"
            raise
        finally:
            self.ended.set()
        return b"answer"

    async def stream(self, message, context):
        try:
            yield b"first"
            await self.goes_on.wait()
            yield b"second"
            self.end = "by itself"
        except asyncio.CancelledError:
            self.end = "cancelled"
            raise
        except GeneratorExit:
            self.end = "closed"
            raise
        finally:
            self.ended.set()


def on_virtual_time(test):
    """Has everything be done that can be before time passes, as on a machine that is not busy."""

    @functools.wraps(test)
    def timeless(*args, **kwargs):
        run(test(*args, **kwargs))

    return timeless


async def all_of(answer):
    """The replies of a unary call or a stream."""
    return [reply async for reply in answer] if inspect.isasyncgen(answer) else await answer


@pytest.fixture
def call():
    return FakeCall()


@pytest.mark.parametrize("message", [PATIENT, WITHOUT, b"\xff"])
async def test_what_has_time_is_passed_on_as_it_is(call, message):
    call.goes_on.set()
    assert await with_deadline(call.unary)(message, None) == b"answer"
    assert [reply async for reply in with_deadline(call.stream)(message, None)] == [b"first", b"second"]


async def test_an_answer_that_is_late_is_not_waited_for_and_its_call_ends_by_itself(call):
    """Cancelled, it would be counted as a client's own doing."""
    with pytest.raises(DeadlinePassed, match="time ran out"):
        await with_deadline(call.unary)(HASTY, None)
    assert not call.ended.is_set()
    call.goes_on.set()
    await call.ended.wait()
    assert call.end == "by itself"


@on_virtual_time
async def test_a_stream_ends_at_its_deadline_with_what_had_come_and_is_read_to_its_end(call):
    replies = with_deadline(call.stream)(HASTY, None)
    assert await anext(replies) == b"first"
    with pytest.raises(DeadlinePassed):
        await anext(replies)
    call.goes_on.set()
    await call.ended.wait()
    assert call.end == "by itself"


@pytest.mark.parametrize("kind", ["unary", "stream"])
@on_virtual_time
async def test_a_call_that_does_not_end_by_itself_is_cancelled(call, kind, monkeypatch, caplog):
    monkeypatch.setattr(proxy_deadline, "CANCEL_GRACE_S", 0.05)
    handler = with_deadline(getattr(call, kind))
    with pytest.raises(DeadlinePassed):
        await all_of(handler(HASTY, None))
    await call.ended.wait()
    assert call.end == "cancelled"
    await asyncio.sleep(0)
    assert "after its deadline and is cancelled" in caplog.text


@pytest.mark.parametrize("kind", ["unary", "stream"])
@on_virtual_time
async def test_a_client_that_goes_away_in_time_cancels_its_call(call, kind):
    handler = with_deadline(getattr(call, kind))
    reading = asyncio.ensure_future(all_of(handler(PATIENT, None)))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert call.end == "cancelled"


async def test_a_stream_that_is_dropped_between_messages_is_closed(call):
    replies = with_deadline(call.stream)(PATIENT, None)
    assert await anext(replies) == b"first"
    await replies.aclose()
    assert call.end == "closed"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, None])
def test_a_time_that_cannot_be_kept_is_left_to_who_refuses_it(timeout_s):
    message = pb.GenerateRequest(text="a", timeout_s=timeout_s)
    assert timeout_of(message.SerializeToString()) is None
