"""Calls over a link, on real sockets: each reply arrives by itself, whatever the rest of its call takes."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import WorkerLost
from core.records import DraftRequest
from deploy.link.client import Link
from deploy.link.server import LinkServer
from tests.deploy.link.test_link_growth import EPOCH, FakeLoop, request, until


@pytest.fixture
def engine():
    return FakeLoop()


@pytest.fixture
async def link(engine):
    listener = LinkServer(EPOCH, (DraftRequest,), engine.post)
    link = await Link.open(await listener.start("127.0.0.1", (0, 0)))
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
    call = await begin(link, engine, "ab", lambda reply: taken.append(reply.stamp.session))
    engine.end("b")
    await until(lambda: taken == ["b"])
    assert not call.done()
    engine.end("a")
    assert [reply.stamp.session for reply in await call] == ["a", "b"]
    assert taken == ["b", "a"]


async def test_what_a_caller_does_not_believe_ends_its_call_and_harms_no_other(link, engine):
    def refuse(_reply):
        raise WorkerLost("it belongs to nobody")

    call = await begin(link, engine, "ab", refuse)
    other = await begin(link, engine, "c", None)
    engine.end("a")
    with pytest.raises(WorkerLost, match="it belongs to nobody"):
        await call
    engine.end("b")
    engine.end("c")
    assert len(await other) == 1
    assert not link.is_closed
