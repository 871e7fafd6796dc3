"""The port to an engine without an engine: which way a call goes, and what of the answers is believed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayError

from core.errors import WorkerLost
from core.records import (
    Base,
    Continuation,
    DraftDone,
    DraftRequest,
    DraftUpdate,
    Missing,
    Stamp,
    Verdict,
    VerifyRequest,
)
from core.speculation import EMPTY_BLOCK
from core.speculation.growth import NewNodes, TreeSpec
from deploy.link.stream import FrameTooLong
from deploy.serve.deployments import LeaseGrant
from deploy.serve.engine_ports import DraftEnginePort, TargetEnginePort

STAMP = Stamp("a", 5, 1)
REQUEST = VerifyRequest(STAMP, Base(0, 0), (1,))
BY_CALL, BY_LINK = Verdict(STAMP, (), 1, 1), Verdict(STAMP, (), 2, 1)


class Actor:
    """A handle whose `verify` answers at once."""

    def __init__(self) -> None:
        self.verify = self

    async def remote(self, batch: Any) -> list[Verdict]:
        return [BY_CALL for _ in batch]


class FakeLink:
    """Answers what it is told to, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.is_closed = False

    async def exchange(self, batch: Any, take: Any, silence_s: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self, reason: str) -> None:
        self.is_closed = True


def port(answer: Any = None) -> TargetEnginePort:
    port = TargetEnginePort(LeaseGrant("target-5", 5, Actor(), "replica"), 1.0, "target-5")
    if answer is not None:
        port.use(FakeLink(answer))
    return port


async def test_without_a_link_calls_go_to_the_actor():
    assert await port().verify([REQUEST]) == [BY_CALL]


OFFERS = [Continuation(Stamp("a", 5, number + 1), number, EMPTY_BLOCK, is_open=True) for number in (1, 2, 3)]


class SteppingActor:
    """A handle whose `verify` returns when all of its batch is answered, as the engine's does."""

    def __init__(self) -> None:
        self.verify = self
        self.answers = {offer.stamp: asyncio.get_running_loop().create_future() for offer in OFFERS}

    async def remote(self, batch: Any) -> list[Any]:
        return [await self.answers[request.stamp] for request in batch]


async def test_without_a_link_the_answer_to_an_offer_does_not_wait_for_those_to_later_ones():
    actor, taken = SteppingActor(), list[Any]()
    by_call = TargetEnginePort(LeaseGrant("target-5", 5, actor, "replica"), 1.0, "target-5")
    call = asyncio.create_task(by_call.verify(OFFERS, taken.append))
    replies = [Verdict(offer.stamp, (), 7, 9) for offer in OFFERS]
    for number, reply in enumerate(replies, 1):
        actor.answers[reply.stamp].set_result(reply)
        for _ in range(10):
            await asyncio.sleep(0)
        assert taken == replies[:number]
    assert await call == replies


async def test_without_a_link_an_offer_that_is_lost_with_its_engine_is_the_loss_of_all():
    actor = SteppingActor()
    by_call = TargetEnginePort(LeaseGrant("target-5", 5, actor, "replica"), 1.0, "target-5")
    actor.answers[OFFERS[1].stamp].set_exception(WorkerLost("gone"))
    with pytest.raises(WorkerLost, match="target-5 failed"):
        await by_call.verify(OFFERS, lambda _: None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert all(answer.done() for answer in actor.answers.values()), "nobody waits for the others"


async def test_with_a_link_they_do_not():
    assert await port([BY_LINK]).verify([REQUEST]) == [BY_LINK]


class StreamingLink(FakeLink):
    """Passes its answers on one by one, as a link does."""

    async def exchange(self, batch: Any, take: Any, silence_s: float) -> Any:
        for reply in self.answer:
            take(reply)
        return self.answer


async def test_replies_over_a_link_are_taken_as_they_arrive():
    taken: list[Any] = []
    by_link = port()
    by_link.use(StreamingLink([BY_LINK]))
    assert await by_link.verify([REQUEST], taken.append) == [BY_LINK]
    assert taken == [BY_LINK]


async def test_an_update_of_a_draft_is_no_verdict_and_taken_by_nobody():
    taken: list[Any] = []
    by_link = port()
    by_link.use(StreamingLink([DraftDone(STAMP, NewNodes(0), 1)]))
    with pytest.raises(WorkerLost, match="did not give one reply for each of 1 requests"):
        await by_link.verify([REQUEST], taken.append)
    assert not taken


async def test_what_is_too_long_for_the_link_goes_to_the_actor(caplog):
    assert await port(FrameTooLong("a frame of 9 bytes")).verify([REQUEST]) == [BY_CALL]
    assert "1 requests to target-5 go by an actor call: a frame of 9 bytes" in caplog.text


async def test_a_lost_link_is_a_lost_engine():
    with pytest.raises(WorkerLost, match="target-5 failed: it broke"):
        await port(WorkerLost("it broke")).verify([REQUEST])


@pytest.mark.parametrize("answer", [[], [BY_LINK, BY_LINK], [DraftDone(STAMP, NewNodes(0), 1)], [None]])
async def test_replies_that_do_not_belong_are_not_believed(answer):
    with pytest.raises(WorkerLost, match="did not give one reply for each of 1 requests"):
        await port(answer).verify([REQUEST])


async def test_an_engine_that_is_known_to_be_lost_is_not_called_and_its_link_is_closed():
    lost = port([BY_LINK])
    lost.mark_lost()
    assert lost.has_broken_link
    with pytest.raises(WorkerLost, match="target-5 is gone"):
        await lost.verify([REQUEST])


GROW = DraftRequest(STAMP, Base(0, 0), (1,), TreeSpec(1, 1))
END = Missing(STAMP, 0)


class GrowingActor:
    """A handle whose `grow` streams what it is told to, as Ray does: one awaitable after the other."""

    def __init__(self, *said: Any) -> None:
        self.grow, self.said = self, said

    async def remote(self, _request: Any) -> Any:
        for each in self.said:
            if isinstance(each, Exception):
                raise each
            future = asyncio.get_running_loop().create_future()
            future.set_result(each)
            yield future


class GrowingLink(FakeLink):
    async def grow(self, _request: Any, take: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        take(DraftUpdate(STAMP, NewNodes(7), 1))
        return self.answer


def growing_port(actor: GrowingActor, answer: Any = None) -> DraftEnginePort:
    port = DraftEnginePort(LeaseGrant("draft-5", 5, actor, "replica"), 1.0, "draft-5")
    if answer is not None:
        port.use(GrowingLink(answer))
    return port


BY_ACTOR = [DraftUpdate(STAMP, NewNodes(1), 1), DraftUpdate(STAMP, NewNodes(2), 1), END]


@pytest.mark.parametrize(
    ("answer", "firsts"), [(None, [1, 2]), (END, [7]), (FrameTooLong("a frame of 9 bytes"), [1, 2])]
)
async def test_growth_goes_over_the_link_if_it_can(answer, firsts):
    heard: list[int] = []
    port = growing_port(GrowingActor(*BY_ACTOR), answer)
    assert await port.grow(GROW, lambda each: heard.append(each.new_nodes.first)) == END
    assert heard == firsts


@pytest.mark.parametrize(
    ("said", "answer", "problem"),
    [
        ((), None, "without a reply"),
        ((Verdict(STAMP, (), 1, 1),), None, "without a reply"),
        ((RayError("it died"),), None, "draft-5 failed: it died"),
        ((), WorkerLost("it broke"), "draft-5 failed: it broke"),
        ((), Verdict(STAMP, (), 1, 1), "without a reply"),
    ],
)
async def test_growth_without_a_proper_end_is_a_lost_engine(said, answer, problem):
    with pytest.raises(WorkerLost, match=problem):
        await growing_port(GrowingActor(*said), answer).grow(GROW, lambda _: None)


async def test_an_engine_that_is_gone_grows_nothing():
    lost = growing_port(GrowingActor(*BY_ACTOR))
    lost.mark_lost()
    with pytest.raises(WorkerLost, match="draft-5 is gone"):
        await lost.grow(GROW, lambda _: None)
