"""The port to an engine without an engine: which way a call goes, and what of the answers is believed."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import WorkerLost
from core.records import Base, Drafted, Stamp, Verdict, VerifyRequest
from deploy.link.frames import FrameTooLong
from deploy.ports import TargetEnginePort
from deploy.workers import LeaseGrant

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

    async def exchange(self, batch: Any) -> Any:
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


async def test_with_a_link_they_do_not():
    assert await port([BY_LINK]).verify([REQUEST]) == [BY_LINK]


async def test_what_is_too_long_for_the_link_goes_to_the_actor(caplog):
    assert await port(FrameTooLong("a frame of 9 bytes")).verify([REQUEST]) == [BY_CALL]
    assert "1 requests to target-5 go by an actor call: a frame of 9 bytes" in caplog.text


async def test_a_lost_link_is_a_lost_engine():
    with pytest.raises(WorkerLost, match="target-5 failed: it broke"):
        await port(WorkerLost("it broke")).verify([REQUEST])


@pytest.mark.parametrize("answer", [[], [BY_LINK, BY_LINK], [Drafted(STAMP, (3,), 1)], [None]])
async def test_replies_that_do_not_belong_are_not_believed(answer):
    with pytest.raises(WorkerLost, match="did not answer 1 requests with as many replies"):
        await port(answer).verify([REQUEST])


async def test_an_engine_that_is_known_to_be_lost_is_not_called_and_its_link_is_closed():
    lost = port([BY_LINK])
    lost.mark_lost()
    assert lost.has_broken_link
    with pytest.raises(WorkerLost, match="target-5 is gone"):
        await lost.verify([REQUEST])
