"""Calls over a link, on real sockets: each reply arrives by itself, whatever the rest of its call takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.errors import WorkerLost
from core.records import DraftRequest
from deploy.link.address import LinkAddress
from deploy.link.client import Link
from tests.deploy.link.listening import listen
from tests.deploy.link.test_link_growth import EPOCH, FakeLoop, request, until


@pytest.fixture
def engine():
    return FakeLoop()


@pytest.fixture
async def link(engine):
    listener, address = listen(engine.post, DraftRequest, EPOCH)
    link = await Link.open(address)
    yield link
    link.close("the test is over")
    listener.close()
    await asyncio.sleep(0.02)


async def begin(link, engine, sessions, take):
    call = asyncio.create_task(link.exchange([request(session) for session in sessions], take))
    await until(lambda: set(sessions) <= set(engine.posted))
    return call


async def test_a_reply_is_passed_on_when_it_arrives_and_the_call_ends_with_the_last(link, engine):
    taken = []
    call = await begin(link, engine, "ab", lambda reply: taken.append(reply.stamp.lease))
    engine.end("b")
    await until(lambda: taken == ["b"])
    assert not call.done()
    engine.end("a")
    await call
    assert taken == ["b", "a"]


async def test_what_a_caller_does_not_believe_ends_its_call_and_harms_no_other(link, engine):
    def refuse(_reply):
        raise WorkerLost("it belongs to nobody")

    call = await begin(link, engine, "ab", refuse)
    other = await begin(link, engine, "c", print)
    engine.end("a")
    with pytest.raises(WorkerLost, match="it belongs to nobody"):
        await call
    engine.end("b")
    engine.end("c")
    await other
    assert not link.is_closed


async def test_a_request_that_cannot_be_encoded_leaves_nothing(link):
    unsound = replace(request("a"), suffix=("no token",))
    with pytest.raises(TypeError):
        await link.exchange([unsound, request("b")], print)
    assert not link._open


SILENCE_S = 0.2


async def test_a_call_lasts_as_long_as_the_engine_says_that_it_works_on_it(link, engine, monkeypatch):
    """The clock is the test's own, because the real one jumps on a busy machine."""
    now_s, stamp = asyncio.get_running_loop().time(), request("a").stamp
    call = asyncio.create_task(link.exchange([request("a")], print, SILENCE_S))
    await until(lambda: "a" in engine.posted)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        for _ in range(10):
            now_s += SILENCE_S / 2
            engine.link.working([stamp])
            while link._open[stamp].reported_s < now_s:  # noqa: ASYNC110  it happens at the other end
                await asyncio.sleep(0)
    assert not call.done(), "five times as long as it would wait for silence"
    engine.end("a")
    await call


@pytest.mark.parametrize("others", [False, True])
async def test_an_engine_that_says_nothing_of_a_call_has_lost_it(link, engine, others):
    """Whatever it says of others': it may not have got this one."""
    call = asyncio.create_task(link.exchange([request("a")], print, SILENCE_S))
    other = await begin(link, engine, "b", print)
    await until(lambda: "a" in engine.posted)
    while not call.done():
        if others:
            engine.link.working([request("b").stamp, request("unknown").stamp])
        await asyncio.sleep(SILENCE_S / 10)
    with pytest.raises(TimeoutError):
        await call
    assert not link.is_closed
    engine.end("b")
    await other


async def test_an_engine_that_stops_working_is_found_out_after_the_same_silence(link, engine):
    call = asyncio.create_task(link.exchange([request("a"), request("b")], print, SILENCE_S))
    await until(lambda: "a" in engine.posted)
    engine.link.working([request("a").stamp])
    engine.end("b")
    with pytest.raises(TimeoutError):
        await call


async def test_a_link_that_is_not_read_is_given_up():
    full = Link(LinkAddress("127.0.0.1", 1, 5, b"key"))
    full.pause_writing()
    with pytest.raises(TimeoutError):
        await full.exchange([request("a")], print, 0.01)
    full._opened.cancel()


async def test_calls_that_waited_for_a_full_link_write_in_their_order(link, engine):
    """A message may continue what an earlier one began, so none made right after the wait overtakes those in it."""
    link.pause_writing()
    calls = [asyncio.create_task(link.exchange([request(name)], print)) for name in "ab"]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(link.exchange([request("c")], print)))
    link.resume_writing()  # wakes the others after the third has begun
    await until(lambda: len(engine.posted) == 3)
    assert list(engine.posted) == ["a", "b", "c"]
    for name in "abc":
        engine.end(name)
    await asyncio.gather(*calls)
