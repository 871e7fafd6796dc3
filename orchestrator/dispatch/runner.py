"""Executes the commands of sessions: takes leases, sends requests, runs timers, delivers chunks to clients.

One asyncio loop and no locks: an event is handled and its commands are started without an await in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core.errors import DeadlinePassed, OutriderError, Unavailable, WorkerLost, WorkerStopping
from core.ports import Clock, DraftPort, Lease, Leases, TargetPort
from core.records import (
    Chunk,
    Continuation,
    DraftReply,
    DraftRequest,
    Stamp,
    TargetRequest,
    VerifyReply,
    VerifyRequest,
    is_last,
)
from orchestrator.dispatch.engine_pool import EnginePool
from orchestrator.session import BeamSession, DraftWait, Session
from orchestrator.session import messages as m

logger = logging.getLogger(__name__)

MAX_TARGET_CALLS = 1
"""Maximum number of decoding calls to one target without a reply. Sessions that become ready in the meantime share the
next pass."""

Sink = Callable[[Chunk | OutriderError], None]
"""Receives the chunks of one stream. The last is a chunk with a finish reason, or an error. Each output of a beam
search has such a chunk."""


@dataclass(slots=True)
class _Running:
    """A session, with its leases and tasks."""

    session: Session | BeamSession
    sink: Sink
    target: Lease[TargetPort] | None = None
    drafts: dict[int, Lease[DraftPort]] = field(default_factory=dict)
    """Leases by number: that of the draft, plus a multiple of the number of drafts for each further lease of it."""
    verify_sent_s: float = 0.0
    draft_sent_s: dict[Stamp, float] = field(default_factory=dict)
    """Send time in seconds of each message that its draft has not ended."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    late: asyncio.Task[None] | None = None

    def draft_of(self, lease: str) -> int | None:
        """Return the number of the draft that granted this lease; None once it was released."""
        return next((number for number, held in self.drafts.items() if held.name == lease), None)


class Runner:
    """Runs the sessions of one orchestrator."""

    def __init__(self, leases: Leases, clock: Clock, num_drafts: int = 1) -> None:
        """`num_drafts`: number of drafts that a session may lease at once."""
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._leased: dict[str, _Running] = {}
        self._ended_wait = DraftWait()
        self._targets: EnginePool[TargetRequest, VerifyReply] = EnginePool(
            leases.take_target, self._on_target_answer, MAX_TARGET_CALLS
        )
        self._drafts: list[EnginePool[DraftRequest, DraftReply]] = [
            EnginePool(partial(leases.take_draft, draft=number), self._on_draft_answer, is_joint=_is_block)
            for number in range(num_drafts)
        ]
        self._carry_out: dict[type[m.Command], Callable[[_Running, Any], None]] = {
            m.LeaseTarget: self._lease_target,
            m.LeaseDraft: self._lease_draft,
            VerifyRequest: self._verify,
            Continuation: self._continue,
            DraftRequest: self._draft,
            m.Await: self._await,
            Chunk: lambda running, chunk: running.sink(chunk),
            m.Fail: lambda running, fail: running.sink(fail.error),
            m.ReleaseTarget: self._release_target,
            m.ReleaseDraft: self._release_draft,
        }

    @property
    def num_sessions(self) -> int:
        return len(self._running)

    @property
    def num_engines(self) -> int:
        """Number of engines on which a session holds a lease."""
        return self._targets.num_engines + sum(pool.num_engines for pool in self._drafts)

    @property
    def num_drafted(self) -> int:
        """Number of sessions that hold a lease on a draft."""
        return sum(bool(running.drafts) for running in self._running.values())

    @property
    def draft_wait(self) -> DraftWait:
        """Total wait since the start, over all sessions."""
        waits = (running.session.stats.draft_wait for running in self._running.values())
        return sum(waits, start=self._ended_wait)

    def start(self, session: Session | BeamSession, sink: Sink, deadline: float | None = None) -> None:
        """Run `session` until it ends by itself, fails, or is abandoned."""
        running = self._running[session.id] = _Running(session, sink)
        if deadline is not None:
            self._spawn(running, self._end_at(session.id, deadline))
        now_s = self._clock.now()
        self._do(running, lambda: session.start(now_s))

    def abandon(self, session_id: str, error: OutriderError) -> None:
        """End a session now; `error` goes to its sink. Does nothing if it has already ended."""
        self._handle(session_id, m.Abandoned(error))

    async def close(self, error: OutriderError) -> None:
        """Abandon every session, and wait until all leases are released."""
        for session_id in list(self._running):
            self.abandon(session_id, error)
        await self._targets.drain()
        for pool in self._drafts:
            await pool.drain()

    def _handle(self, session_id: str, event: m.Event) -> None:
        if (running := self._running.get(session_id)) is not None:
            self._do(running, lambda: running.session.handle(event))

    def _do(self, running: _Running, decide: Callable[[], list[m.Command]]) -> None:
        """Execute the session's decision. A bug in one session ends that session alone."""
        try:
            for command in decide():
                self._carry_out[type(command)](running, command)
        except Exception:
            logger.exception("%r failed", running.session)
            self._break_off(running)
        if running.session.is_closed:
            self._forget(running)

    def _break_off(self, running: _Running) -> None:
        running.session.break_off()
        running.sink(OutriderError("an internal error ended this completion; it is in the orchestrator's log"))
        self._release_target(running, m.ReleaseTarget())
        for number in tuple(running.drafts):
            self._release_draft(running, m.ReleaseDraft(number))
        self._forget(running)

    def _forget(self, running: _Running) -> None:
        if self._running.pop(running.session.id, None) is not None:
            self._ended_wait += running.session.stats.draft_wait
        for task in running.tasks:
            task.cancel()

    def _spawn(self, running: _Running, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the session."""
        task = asyncio.ensure_future(work)
        running.tasks.add(task)
        task.add_done_callback(running.tasks.discard)
        return task

    # The target's side

    def _lease_target(self, running: _Running, command: m.LeaseTarget) -> None:
        self._spawn(running, self._take_target(running, command.delay_s))

    async def _take_target(self, running: _Running, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        try:
            session = running.session
            lease = running.target = await self._targets.take(session.id, session.tokens, session.adapter)
        except Unavailable as error:
            self._handle(running.session.id, m.Abandoned(error))
            return
        self._leased[lease.name] = running
        self._handle(running.session.id, m.TargetLeased(lease.name, lease.epoch))

    def _verify(self, running: _Running, request: VerifyRequest) -> None:
        assert running.target is not None, "a session verifies only while it holds a lease"
        running.verify_sent_s = self._clock.now()
        self._targets.calls_to(running.target).put(request)

    def _continue(self, running: _Running, offer: Continuation) -> None:
        assert running.target is not None, "a session offers something only while it holds a lease"
        self._targets.calls_to(running.target).put(offer)

    def _on_target_answer(self, request: TargetRequest, answer: VerifyReply | WorkerLost) -> None:
        stamp = request.stamp
        if (running := self._leased.get(stamp.lease)) is None:
            return
        if isinstance(answer, WorkerLost):
            is_planned = isinstance(answer, WorkerStopping)
            self._handle(running.session.id, m.TargetLost(stamp.epoch, str(answer), is_planned))
        else:
            replied = m.TargetReplied(answer, running.verify_sent_s, self._clock.now())
            self._handle(running.session.id, replied)

    def _release_target(self, running: _Running, _command: m.ReleaseTarget) -> None:
        lease, running.target = running.target, None
        if lease is not None:
            del self._leased[lease.name]
            self._targets.give_back(lease)

    # The draft's side

    def _lease_draft(self, running: _Running, command: m.LeaseDraft) -> None:
        self._spawn(running, self._take_draft(running, command))

    async def _take_draft(self, running: _Running, command: m.LeaseDraft) -> None:
        await self._clock.sleep(command.delay_s)
        number = command.draft
        try:
            lease = await self._drafts[number % len(self._drafts)].take(running.session.id, running.session.tokens)
        except Unavailable as error:
            logger.info("session %s goes on without a draft: %s", running.session.id, error)
            self._handle(running.session.id, m.DraftNotLeased(number))
            return
        running.drafts[number] = lease
        self._leased[lease.name] = running
        self._handle(running.session.id, m.DraftLeased(lease.name, lease.epoch, number))

    def _draft(self, running: _Running, request: DraftRequest) -> None:
        number = running.draft_of(request.stamp.lease)
        assert number is not None, "a session drafts only while it holds a lease"
        running.draft_sent_s[request.stamp] = self._clock.now()
        self._drafts[number % len(self._drafts)].calls_to(running.drafts[number]).put(request)

    def _await(self, running: _Running, command: m.Await) -> None:
        if running.late is not None:
            running.late.cancel()
        running.late = self._spawn(running, self._report_late(command.stamp, command.timeout_s))

    def _on_draft_answer(self, request: DraftRequest, answer: DraftReply | WorkerLost) -> None:
        stamp = request.stamp
        if (running := self._leased.get(stamp.lease)) is None:
            return
        if isinstance(answer, WorkerLost):
            self._handle(running.session.id, m.DraftLost(stamp.epoch, running.draft_of(stamp.lease) or 0))
            return
        sent_s = running.draft_sent_s.pop(stamp, 0.0) if is_last(answer) else running.draft_sent_s.get(stamp, 0.0)
        self._handle(running.session.id, m.DraftReplied(answer, sent_s, self._clock.now()))

    def _release_draft(self, running: _Running, command: m.ReleaseDraft) -> None:
        lease = running.drafts.pop(command.draft, None)
        if lease is None:
            return
        del self._leased[lease.name]
        running.draft_sent_s = {
            stamp: sent_s for stamp, sent_s in running.draft_sent_s.items() if stamp.lease != lease.name
        }
        self._drafts[command.draft % len(self._drafts)].give_back(lease)

    # Time

    async def _report_late(self, stamp: Stamp, timeout_s: float) -> None:
        await self._clock.sleep(timeout_s)
        if (running := self._leased.get(stamp.lease)) is not None:
            self._handle(running.session.id, m.DraftLate(stamp))

    async def _end_at(self, session_id: str, deadline: float) -> None:
        await self._clock.sleep(deadline - self._clock.now())
        self._handle(session_id, m.Abandoned(DeadlinePassed("the request's time ran out")))


def _is_block(request: DraftRequest) -> bool:
    """Whether a round waits for the end of this growth. Blocks that arrive together share a pass of the target."""
    return request.growth.ends
