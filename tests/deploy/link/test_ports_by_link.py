"""The port to an engine over a fake link: what of its replies is believed."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import WorkerLost
from core.records import Base, DraftRequest, DraftUpdate, Missing, Stamp, Verdict, VerifyRequest
from core.speculation.growth import NewNodes, TreeSpec
from deploy.link.address import LinkAddress
from deploy.serve.deployments import LeaseGrant
from deploy.serve.engine_ports import DraftEnginePort, EnginePort, TargetEnginePort

STAMP = Stamp("a", 5, 1)
REQUEST = VerifyRequest(STAMP, Base(0, 0), (1,))
GROW = DraftRequest(STAMP, Base(0, 0), (1,), TreeSpec(1, 1))
VERDICT, UPDATE, MISSING = Verdict(STAMP, (), 2, 1), DraftUpdate(STAMP, NewNodes(7), 1), Missing(STAMP, 0)
GRANT = LeaseGrant("engine-5", 5, None, "replica", LinkAddress("127.0.0.1", 1, 5, b"key"))


class FakeLink:
    """Passes on what it is told to, or raises it."""

    def __init__(self, *replies: Any) -> None:
        self.replies = replies
        self.is_closed = False

    async def exchange(self, _batch: Any, take: Any, _silence_s: float) -> None:
        for reply in self.replies:
            if isinstance(reply, Exception):
                raise reply
            take(reply)

    def close(self, _reason: str) -> None:
        self.is_closed = True


def port(*replies: Any, kind: type[EnginePort] = TargetEnginePort) -> EnginePort:
    return kind(GRANT, FakeLink(*replies), 1.0, "engine-5")


@pytest.mark.parametrize(
    ("kind", "request_", "replies"),
    [(TargetEnginePort, REQUEST, [VERDICT]), (DraftEnginePort, GROW, [UPDATE, UPDATE, MISSING])],
)
async def test_replies_are_taken_as_they_arrive(kind, request_, replies):
    taken: list[Any] = []
    await port(*replies, kind=kind).exchange([request_], taken.append)
    assert taken == replies


@pytest.mark.parametrize(
    ("kind", "reply"), [(TargetEnginePort, UPDATE), (TargetEnginePort, None), (DraftEnginePort, VERDICT)]
)
async def test_a_reply_of_another_kind_of_engine_is_a_lost_engine_and_taken_by_nobody(kind, reply):
    taken: list[Any] = []
    with pytest.raises(WorkerLost, match=f"engine-5 failed: it answered with a {type(reply).__name__}"):
        await port(reply, kind=kind).exchange([REQUEST], taken.append)
    assert not taken


async def test_a_lost_link_is_a_lost_engine():
    with pytest.raises(WorkerLost, match="engine-5 failed: it broke"):
        await port(WorkerLost("it broke")).exchange([REQUEST], print)


async def test_an_engine_that_reports_nothing_in_time_is_lost():
    with pytest.raises(WorkerLost, match="engine-5 has not answered for 1 s"):
        await port(TimeoutError()).exchange([REQUEST], print)


async def test_an_engine_that_is_known_to_be_lost_is_not_called_and_its_link_is_closed():
    lost, taken = port(VERDICT), list[Any]()
    lost.mark_lost()
    assert lost.has_broken_link
    with pytest.raises(WorkerLost, match="engine-5 is gone"):
        await lost.exchange([REQUEST], taken.append)
    assert not taken
