"""Leases and ports without Ray: what is on its way when nobody waits any more, and answers that are none.

What Ray itself adds is tested by test_leases.py on a real cluster.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import pytest
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import RayServeException

from core.config import Limits
from core.errors import Unavailable, WorkerLost, WorkerStopping
from core.records import Adapter, Base, DraftRequest, DraftUpdate, Refused, Stamp, Verdict, VerifyRequest
from core.speculation.growth import NewNodes, TreeSpec
from deploy.link.address import LinkAddress, LinkTroubles
from deploy.link.stream import LinkError
from deploy.serve import leases
from deploy.serve.deployments import LeaseGrant, Refusal
from deploy.serve.leases import ServeLeases
from orchestrator.session.statistics import DraftWait
from simulation.clock import run
from tests.exchange import replies_of

REQUESTS = [VerifyRequest(Stamp(name, 1, 1), Base(0, 0), (1,)) for name in "abc"]
VERDICTS = [Verdict(request.stamp, (), 5, 1) for request in REQUESTS]
DRAFT_REQUEST = DraftRequest(Stamp("a", 1, 1), Base(0, 0), (1,), TreeSpec.chain(1))
BROKEN = grpc.aio.AioRpcError(
    grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details="reset by peer"
)
"""Where gRPC says anything but UNAVAILABLE, Serve passes it on."""
CALLER = contextvars.ContextVar("CALLER", default="nobody")
ADDRESS = LinkAddress("127.0.0.1", 1, 1, b"key")


class FakeStream:
    """A streaming call of Serve: brings a grant when it is told to, and stays open until somebody ends it."""

    def __init__(self, grant: LeaseGrant | Refusal) -> None:
        self._grant = grant
        self.granted = asyncio.Event()
        self._ended = asyncio.Event()
        self.failure: Exception | None = None
        self._has_granted = self._is_cancelled = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> LeaseGrant | Refusal:
        await asyncio.sleep(0)
        await (self._ended if self._has_granted else self.granted).wait()
        if self.failure is not None:
            raise self.failure
        if self._has_granted:
            raise StopAsyncIteration
        self._has_granted = True
        return self._grant

    def end(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self._ended.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._ended.set()

    def cancelled(self) -> bool:
        return self._is_cancelled


class FakeEngine:
    """An engine actor and the link to it: answers what it was told to, or whatever it is asked."""

    def __init__(self) -> None:
        self.replies: list[object] = [*VERDICTS]
        self.failure: Exception | None = None
        self.num_asked = 0
        self.callers: list[str] = []
        self.released: list[str] = []
        self.release = SimpleNamespace(remote=self._release)

    def _release(self, sessions: list[str]) -> asyncio.Future[None]:
        self.callers.append(CALLER.get())
        self.released += sessions
        done = asyncio.get_running_loop().create_future()
        done.set_result(None) if self.failure is None else done.set_exception(self.failure)
        return done


class FakeLink:
    """The link to a fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.is_closed = False

    async def exchange(self, _batch: object, take: Callable[[object], None], _silence_s: float) -> None:
        self._engine.num_asked += 1
        for reply in self._engine.replies:
            take(reply)

    def close(self, _reason: str) -> None:
        self.is_closed = True


class FakeLinks:
    """Opens one link after the other, or says why not."""

    troubles = LinkTroubles()

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.problems: list[str] = []
        self._link: FakeLink | None = None

    async def to(self, _engine_id: str, _address: LinkAddress) -> FakeLink:
        if self.problems:
            raise LinkError(self.problems.pop(0))
        if self._link is None or self._link.is_closed:
            self._link = FakeLink(self._engine)
        return self._link


class FakeHandle:
    """A deployment of one replica after the other; `grants_at_once` or when a test says so."""

    def __init__(self, name: str, *, grants_at_once: bool = True) -> None:
        self.deployment_name = name
        self.engine = FakeEngine()
        self.replica_id = "replica 1"
        self.streams: list[FakeStream] = []
        self.asked: list[tuple[str, tuple[object, ...]]] = []
        self.failures: list[Exception] = []
        self.refusals: list[str] = []
        self.had_refused: list[frozenset[str]] = []
        self.reports: list[tuple[float, float]] = []
        self.adapters: list[Adapter | None] = []
        self.report_failure: Exception | None = None
        self._grants_at_once = grants_at_once
        self.lease = SimpleNamespace(remote=self._lease)
        self.describe = SimpleNamespace(remote=self._describe)
        self.report_wait = SimpleNamespace(remote=self._report)

    def options(self, *, stream: bool, _by_reference: bool) -> FakeHandle:
        assert (stream, _by_reference) == (True, False), "a lease is a stream by gRPC"
        return self

    def _lease(
        self, name: str, prefix: tuple[object, ...], refused_by: frozenset[str], adapter: Adapter | None
    ) -> FakeStream:
        self.asked.append((name, prefix))
        self.adapters.append(adapter)
        self.had_refused.append(refused_by)
        grant = LeaseGrant("engine 1", 1, self.engine, self.replica_id, ADDRESS)
        stream = FakeStream(Refusal(self.refusals.pop(0)) if self.refusals else grant)
        if self.failures:
            stream.failure = self.failures.pop(0)
        if self._grants_at_once:
            stream.granted.set()
        self.streams.append(stream)
        return stream

    async def _describe(self) -> str:
        if self.report_failure is not None:
            raise self.report_failure
        return f"a {self.deployment_name}"

    async def _report(self, waited_s: float, round_s: float) -> None:
        self.reports.append((waited_s, round_s))
        if self.report_failure is not None:
            raise self.report_failure


class Served:
    def __init__(self, *, grants_at_once: bool = True, **limits: float) -> None:
        self.target = FakeHandle("target", grants_at_once=grants_at_once)
        self.draft = FakeHandle("draft", grants_at_once=grants_at_once)
        self.leases = ServeLeases(self.target, [(self.draft, None)], Limits(**limits))
        self.links = self.leases._target.links = FakeLinks(self.target.engine)
        self.leases._drafts[0].links = FakeLinks(self.draft.engine)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def served():
    return Served()


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_a_wait_for_a_lease_that_is_cancelled_takes_the_grant_along(kind):
    """It may be on its way already: a place that nobody uses would be taken until the engine expires it."""
    served = Served(grants_at_once=False)
    waiting = asyncio.ensure_future(getattr(served.leases, f"take_{kind}")("a"))
    await settle()
    (stream,) = getattr(served, kind).streams
    assert not stream.cancelled()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert stream.cancelled()


async def test_a_grant_that_comes_in_the_moment_of_the_cancellation_is_given_back():
    served = Served(grants_at_once=False)
    waiting = asyncio.ensure_future(served.leases.take_target("a"))
    await settle()
    served.target.streams[0].granted.set()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert served.target.streams[0].cancelled()


async def test_who_has_waited_for_too_long_gives_back_what_comes_later():
    served = Served(grants_at_once=False, lease_timeout_s=0.01)
    with pytest.raises(Unavailable, match=r"no target granted a lease within 0\.01 s$"):
        await served.leases.take_target("a")
    assert served.target.streams[0].cancelled()


async def test_another_replica_is_asked_when_one_dies_while_it_grants(served, monkeypatch):
    monkeypatch.setattr(leases, "GRANT_RETRY_S", 0.001)
    served.target.failures = [RayError("died"), ActorDiedError(), BROKEN]
    lease = await served.leases.take_target("a")
    assert [stream.cancelled() for stream in served.target.streams] == [True, True, True, False]
    names = [name for name, _ in served.target.asked]
    assert len(set(names)) == 4, "each attempt has a name of its own: one may have been granted after all"
    assert lease.name == names[-1]
    assert all(name.startswith("a@") for name in names)


async def test_who_is_refused_asks_again_and_says_by_whom(served):
    served.target.refusals = ["replica 1", "replica 2", "replica 1"]
    lease = await served.leases.take_target("a")
    both = frozenset({"replica 1", "replica 2"})
    assert served.target.had_refused == [frozenset(), frozenset({"replica 1"}), both, both]
    lease.release()
    await served.leases.take_target("b")
    assert served.target.had_refused[-1] == frozenset(), "another session has not been refused by anybody"


async def test_who_was_refused_to_the_end_is_told_why():
    served = Served(lease_timeout_s=0.05)
    served.target.refusals = ["replica 1"] * 100_000
    with pytest.raises(Unavailable, match=r"no target granted a lease within 0\.05 s: an engine is loading"):
        await served.leases.take_target("a")


async def test_where_a_link_has_broken_another_is_opened(served):
    """The engine may be well; a session with a lease by the broken link has to move all the same."""
    before = await served.leases.take_target("a")
    before.port._link.close("it broke")
    after = await served.leases.take_target("b")
    assert after.port is not before.port
    assert await replies_of(after.port, REQUESTS) == VERDICTS
    assert (await served.leases.take_target("c")).port is after.port


async def test_a_grant_without_a_link_is_given_back_and_another_replica_is_asked(served):
    served.links.problems = ["refused"]
    await served.leases.take_target("a")
    assert [stream.cancelled() for stream in served.target.streams] == [True, False]
    assert served.target.had_refused == [frozenset(), frozenset({"replica 1"})]


async def test_between_two_attempts_at_the_same_link_is_a_pause(monkeypatch):
    """A link that is refused fails at once: without a pause thousands of leases would be taken and given back."""
    monkeypatch.setattr(leases, "GRANT_RETRY_S", 0.02)
    served = Served(lease_timeout_s=0.1)
    served.links.problems = ["refused"] * 100_000
    with pytest.raises(Unavailable):
        await served.leases.take_target("a")
    assert 2 <= len(served.target.streams) <= 7


async def test_without_any_link_the_reason_is_told():
    served = Served(lease_timeout_s=0.05)
    served.links.problems = ["no answer within 5 s"] * 100_000
    with pytest.raises(
        Unavailable, match=r"granted a lease within 0\.05 s: no link to an engine: no answer within 5 s$"
    ):
        await served.leases.take_target("a")


async def test_without_any_grant_the_last_problem_is_told(monkeypatch):
    monkeypatch.setattr(leases, "GRANT_RETRY_S", 0.001)
    served = Served(lease_timeout_s=0.05)
    served.target.failures = [RayError("out of memory") for _ in range(1000)]
    with pytest.raises(Unavailable, match=r"no target granted a lease within .* out of memory"):
        await served.leases.take_target("a")
    served.target.failures = [BROKEN] * 1000
    with pytest.raises(Unavailable, match=r"no target granted a lease within .* s: INTERNAL: reset by peer$"):
        await served.leases.take_target("a")
    served.draft.failures = [RayServeException("no such deployment")]
    with pytest.raises(Unavailable, match="no draft granted a lease"):
        await served.leases.take_draft("a")


async def test_the_beginning_of_the_text_goes_with_the_wish_for_a_lease(served):
    await served.leases.take_target("a", list(range(130)))
    await served.leases.take_target("b", list(range(64)))
    (_, long), (_, short) = served.target.asked
    assert (len(long), len(short)) == (2, 1)
    assert long[0] == short[0]


async def test_the_adapter_goes_with_the_wish_for_a_lease_and_is_part_of_the_prefix(served):
    one, other = Adapter("a", "/a", "sha256:1"), Adapter("a", "/a", "sha256:2")
    for adapter in (None, one, other):
        await served.leases.take_target("a", list(range(64)), adapter)
    assert served.target.adapters == [None, one, other]
    assert len({prefix for _, prefix in served.target.asked}) == 3


async def test_replies_of_each_kind_are_passed_on(served):
    lease, other = await served.leases.take_target("a"), await served.leases.take_draft("a")
    replies = served.target.engine.replies = [*VERDICTS[:2], Refused(REQUESTS[2].stamp, "over")]
    assert await replies_of(lease.port, REQUESTS) == replies
    served.draft.engine.replies = [DraftUpdate(DRAFT_REQUEST.stamp, NewNodes(0), 1, is_over=True)]
    assert await replies_of(other.port, [DRAFT_REQUEST]) == served.draft.engine.replies
    served.draft.engine.replies = [VERDICTS[0]]
    with pytest.raises(WorkerLost, match="engine 1 failed: it answered with a Verdict"):
        await replies_of(other.port, [DRAFT_REQUEST])


async def test_a_call_belongs_to_no_clients_request(served):
    lease = await served.leases.take_target("a")
    CALLER.set("a client")
    await lease.port.release(["a"])
    assert served.target.engine.callers == ["nobody"]


async def test_an_engine_that_cannot_free_a_session_is_lost(served):
    lease = await served.leases.take_target("a")
    served.target.engine.failure = RayError("\n  the actor died\nand so on")
    with pytest.raises(WorkerLost, match=r"engine 1 failed: the actor died$"):
        await lease.port.release(["a"])


@pytest.mark.parametrize("failure", [None, RayError("killed"), BROKEN])
async def test_a_lease_that_ends_by_itself_takes_all_of_its_engine_along(served, failure):
    lease, other = await served.leases.take_target("a"), await served.leases.take_target("b")
    assert lease.port is other.port
    served.target.streams[0].end(failure)
    await settle()
    for port in (lease.port, other.port):
        with pytest.raises(WorkerLost, match="engine 1 is gone"):
            await replies_of(port, REQUESTS)
    assert not served.target.engine.num_asked, "nobody is asked any more"
    assert "ended" in repr(lease)


async def test_a_lease_that_is_given_back_harms_nobody_else(served):
    lease, other = await served.leases.take_target("a"), await served.leases.take_target("b")
    lease.release()
    lease.release()
    await settle()
    assert served.target.streams[0].cancelled()
    assert not served.target.streams[1].cancelled()
    assert await replies_of(other.port, REQUESTS) == VERDICTS
    await other.port.release(["a", "b"])
    assert served.target.engine.released == ["a", "b"]


def test_a_target_that_is_to_stop_is_left_after_the_grace_and_a_draft_at_once():
    run(leave_a_replica())  # in virtual time: on a busy machine a short grace is over before anything else is done


async def leave_a_replica():
    served = Served(drain_grace_s=0.05)
    target, draft = await served.leases.take_target("a"), await served.leases.take_draft("a")
    served.leases.leave(frozenset({"another replica"}))
    await asyncio.sleep(0.1)
    assert await replies_of(target.port, REQUESTS) == VERDICTS
    served.leases.leave(frozenset({"replica 1"}))
    await asyncio.sleep(0.01)
    assert served.draft.streams[0].cancelled(), "a draft that rests is not called: its lease is given back for it"
    with pytest.raises(WorkerStopping):
        await replies_of(draft.port, [DRAFT_REQUEST])
    assert await replies_of(target.port, REQUESTS) == VERDICTS, "it has its grace"
    served.leases.leave(frozenset({"replica 1"}))
    await asyncio.sleep(0.1)
    with pytest.raises(WorkerStopping, match="engine 1 is about to stop"):
        await replies_of(target.port, REQUESTS)
    assert not served.target.streams[0].cancelled(), "what it holds is given back by the session"


async def test_models_are_described_and_waits_reported(served):
    assert await served.leases.describe_target() == "a target"
    assert await served.leases.describe_draft() == "a draft"
    await served.leases.report_wait(DraftWait(1.0, 3.0))
    assert (served.draft.reports, served.target.reports) == ([(1.0, 3.0)], [])
    served.target.report_failure = served.draft.report_failure = RayError("gone")
    with pytest.raises(Unavailable, match="no draft accepted the report: gone"):
        await served.leases.report_wait(DraftWait())
    with pytest.raises(Unavailable, match="no target answers: gone"):
        await served.leases.describe_target()


async def test_without_a_draft_there_is_none_to_ask(served):
    leases = ServeLeases(served.target, [], Limits())
    leases.leave(frozenset({"replica 1"}))
    await leases.report_wait(DraftWait(1.0, 2.0))
    for wish in (leases.take_draft("a"), leases.describe_draft()):
        with pytest.raises(Unavailable, match="this service has no draft"):
            await wish
