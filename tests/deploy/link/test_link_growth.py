"""Growth over a link, on real sockets: it stays open, costs nobody else a place, and ends with its link."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import WorkerLost
from core.records import Base, DraftRequest, DraftUpdate, Missing, Refused, Sampling, SequenceSpec, Stamp
from core.speculation.growth import NewNodes, TreeSpec
from deploy.link import server
from deploy.link.client import Link
from tests.deploy.link.listening import listen

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
        self.posted |= {each.stamp.lease: each for each in batch}

    def tell(self, session, *firsts):
        self.link.take([DraftUpdate(self.posted[session].stamp, NewNodes(first), 2) for first in firsts])

    def end(self, session, reply=Missing):
        stamp = self.posted[session].stamp
        self.link.take([reply(stamp, 0) if reply is Missing else Refused(stamp, "over")])


@pytest.fixture
def loop():
    return FakeLoop()


@pytest.fixture
async def link(loop):
    listener, address = listen(loop.post, DraftRequest, EPOCH)
    link = await Link.open(address)
    yield link
    link.close("the test is over")
    listener.close()
    await asyncio.sleep(0.02)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  it happens at the other end
            await asyncio.sleep(0.002)


async def begin(link, loop, session="a", take=None):
    replies = []
    growing = asyncio.create_task(link.exchange([request(session)], take or replies.append))
    await until(lambda: session in loop.posted)
    return growing, replies


def firsts_of(replies):
    return [each.new_nodes.first for each in replies if isinstance(each, DraftUpdate)]


async def test_growth_is_told_pass_by_pass_and_ends_with_a_reply(link, loop):
    (first, of_first), (second, of_second) = await begin(link, loop, "a"), await begin(link, loop, "b")
    loop.tell("a", 0, 1)
    loop.tell("b", 5)
    loop.end("a")
    await first
    assert of_first[-1] == Missing(Stamp("a", EPOCH, 1), 0)
    loop.tell("b", 6)
    loop.end("b", Refused)
    await second
    assert of_second[-1].reason == "over"
    assert (firsts_of(of_first), firsts_of(of_second)) == ([0, 1], [5, 6])
    assert not link._open


async def test_only_an_end_makes_room_for_another_request(link, loop, monkeypatch):
    monkeypatch.setattr(server, "MAX_OPEN_REQUESTS", 1)
    growing, replies = await begin(link, loop)
    assert loop.link._num_open == 1
    loop.tell("a", 0, 1, 2)
    await until(lambda: len(replies) == 3)
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
        await link.exchange([request("b")], print)


async def test_who_gives_up_is_told_nothing_more_and_leaves_nothing(link, loop):
    growing, replies = await begin(link, loop)
    growing.cancel()
    loop.tell("a", 0)
    loop.end("a")
    await asyncio.gather(growing, return_exceptions=True)
    other, of_other = await begin(link, loop, "b")
    loop.end("b")
    await other
    assert isinstance(of_other[-1], Missing)
    assert not replies
    assert not link._open


async def test_a_listener_that_fails_harms_nobody_else(link, loop):
    def fail(_):
        raise KeyError("mine")

    bad, _ = await begin(link, loop, "bad", fail)
    good, replies = await begin(link, loop, "good")
    loop.tell("bad", 0, 1)
    with pytest.raises(KeyError, match="mine"):
        await bad
    loop.tell("good", 0)
    loop.end("good")
    await good
    assert isinstance(replies[-1], Missing)
    assert firsts_of(replies) == [0]
    assert not link.is_closed


async def test_growth_that_is_over_ends_its_message_and_what_comes_after_it_is_dropped(link, loop):
    growing, replies = await begin(link, loop)
    stamp = loop.posted["a"].stamp
    loop.link.take([DraftUpdate(stamp, NewNodes(0), 2), DraftUpdate(stamp, NewNodes(0), 2, is_over=True)])
    await growing
    loop.tell("a", 7)
    other, _ = await begin(link, loop, "b")
    loop.end("b")
    await other
    assert len(replies) == 2
    assert loop.link._num_open == 0
