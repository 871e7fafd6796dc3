"""Growth over a link, on real sockets: it stays open, costs nobody else a place, and ends with its link."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import WorkerLost
from core.records import Base, DraftRequest, DraftUpdate, Missing, Refused, Sampling, SequenceSpec, Stamp
from core.speculation.growth import NewNodes, TreeSpec
from deploy.link import server
from deploy.link.client import Link
from deploy.link.server import LinkServer

EPOCH = 5
SPEC = SequenceSpec(prompt_len=2, sampling=Sampling())


def request(session="a"):
    return DraftRequest(Stamp(session, EPOCH, 1), Base(0, 0), (1, 2), TreeSpec(4, 4), spec=SPEC)


class FakeLoop:
    """Keeps what is posted; a test says what is replied, and when."""

    def __init__(self):
        self.posted = {}
        self.link = None

    def post(self, batch, link):
        self.link = link
        self.posted |= {each.stamp.session: (number, each) for number, each in batch}

    def tell(self, session, *firsts):
        number, asked = self.posted[session]
        self.link.take([(number, DraftUpdate(asked.stamp, NewNodes(first), 2)) for first in firsts])

    def end(self, session, reply=Missing):
        number, asked = self.posted[session]
        self.link.take([(number, reply(asked.stamp, 0) if reply is Missing else Refused(asked.stamp, "over"))])


@pytest.fixture
def loop():
    return FakeLoop()


@pytest.fixture
async def link(loop):
    listener = LinkServer(EPOCH, (DraftRequest,), loop.post)
    link = await Link.open(await listener.start("127.0.0.1", (0, 0)))
    yield link
    link.close("the test is over")
    listener.close()
    await asyncio.sleep(0.02)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  it happens at the other end
            await asyncio.sleep(0.002)


async def begin(link, loop, session="a", take=None):
    firsts = []
    growing = asyncio.create_task(
        link.grow(request(session), take or (lambda each: firsts.append(each.new_nodes.first)))
    )
    await until(lambda: session in loop.posted)
    return growing, firsts


async def test_growth_is_told_pass_by_pass_and_ends_with_a_reply(link, loop):
    (first, of_first), (second, of_second) = await begin(link, loop, "a"), await begin(link, loop, "b")
    loop.tell("a", 0, 1)
    loop.tell("b", 5)
    loop.end("a")
    assert await first == Missing(Stamp("a", EPOCH, 1), 0)
    loop.tell("b", 6)
    loop.end("b", Refused)
    assert (await second).reason == "over"
    assert (of_first, of_second) == ([0, 1], [5, 6])
    assert not link._calls


async def test_only_an_end_makes_room_for_another_request(link, loop, monkeypatch):
    monkeypatch.setattr(server, "MAX_OPEN_REQUESTS", 1)
    growing, firsts = await begin(link, loop)
    assert loop.link._num_open == 1
    loop.tell("a", 0, 1, 2)
    await until(lambda: len(firsts) == 3)
    assert loop.link._num_open == 1
    loop.end("a")
    await growing
    await until(lambda: loop.link._num_open == 0)


async def test_a_link_that_closes_ends_growth(link, loop):
    growing, _ = await begin(link, loop)
    loop.link.end()
    with pytest.raises(WorkerLost):
        await growing
    with pytest.raises(WorkerLost):
        await link.grow(request("b"), print)


async def test_who_gives_up_is_told_nothing_more_and_leaves_nothing(link, loop):
    growing, firsts = await begin(link, loop)
    growing.cancel()
    loop.tell("a", 0)
    loop.end("a")
    await asyncio.gather(growing, return_exceptions=True)
    other, _ = await begin(link, loop, "b")
    loop.end("b")
    assert isinstance(await other, Missing)
    assert not firsts
    assert not link._calls


async def test_a_listener_that_fails_harms_nobody_else(link, loop):
    def fail(_):
        raise KeyError("mine")

    bad, _ = await begin(link, loop, "bad", fail)
    good, firsts = await begin(link, loop, "good")
    loop.tell("bad", 0, 1)
    with pytest.raises(KeyError, match="mine"):
        await bad
    loop.tell("good", 0)
    loop.end("good")
    assert isinstance(await good, Missing)
    assert firsts == [0]
    assert not link.is_closed
