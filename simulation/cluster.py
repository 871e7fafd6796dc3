"""Replicas of simulated engines behind `core.ports`: leases, calls over a wire, deaths and restarts.

Must not know sessions. Faults are left to the wire, so the same cluster serves measurements (`scenario`) and chaos
(`faults`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

from core.config import Limits
from core.errors import Unavailable, WorkerLost
from core.ports import DraftPort, Lease, TargetPort
from core.records import Adapter, Continuation, DraftReply, DraftRequest, Stamp, VerifyReply, VerifyRequest, is_last
from simulation.engines import SimDraft, SimEngine, SimTarget
from simulation.wire import Wire

GRANT_RETRY_S = 0.2
"""Seconds before another replica is asked for a lease."""

Engine = TypeVar("Engine", bound=SimTarget | SimDraft)
Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class Replica(Generic[Engine]):
    """One replica of an engine, through all its incarnations."""

    def __init__(self, name: str, start: Callable[[], Engine]) -> None:
        """`start` returns the next incarnation."""
        self._name = name
        self._start = start
        self._past_busy_s = 0.0
        self.num_leases = 0
        self.engine = start()

    def __repr__(self) -> str:
        return f"<Replica {self._name}, {self.num_leases} leases>"

    @property
    def busy_s(self) -> float:
        """Seconds spent in passes, over all incarnations."""
        return self._past_busy_s + self.engine.busy_s

    def restart(self) -> None:
        """Kill the engine and start an empty incarnation."""
        self.engine.kill()
        self._past_busy_s += self.engine.busy_s
        self.engine = self._start()


class SimPort(Generic[Request, Reply]):
    """A connection to one incarnation, shared by its leases."""

    def __init__(
        self, engine: SimEngine[Request, Reply], wire: Wire, timeout_s: float, breaches: list[AssertionError]
    ) -> None:
        self._engine = engine
        self._wire = wire
        self._timeout_s = timeout_s
        self._breaches = breaches
        self.unanswered: set[str] = set()
        """Sessions that wait for a reply."""

    async def release(self, sessions: Sequence[str]) -> None:
        """Raises: WorkerLost."""
        await self._wire.travel()
        if self._engine.is_dead:
            raise WorkerLost(f"{self._engine.engine_id} is gone")
        self._engine.release(sessions)

    async def exchange(self, batch: Sequence[Request], take: Callable[[Reply], None]) -> None:
        """Send requests and pass each reply to `take`; see `core.ports.EnginePort`. Raises: WorkerLost."""
        ended: set[Stamp] = set()

        def take_open(reply: Reply) -> None:
            """Pass on a reply. Like a link, ignore replies after the last one to a request."""
            if reply.stamp not in ended:
                if is_last(reply):
                    ended.add(reply.stamp)
                take(reply)

        growing = [request for request in batch if isinstance(request, DraftRequest) and not request.growth.ends]
        answered_once = [request for request in batch if request not in growing]
        try:
            async with asyncio.TaskGroup() as calls:
                for request in growing:
                    calls.create_task(self._grow(request, take_open))
                if answered_once:
                    calls.create_task(self._call(answered_once, take_open))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _grow(self, request: Request, take: Callable[[Reply], None]) -> None:
        await self._watched([request], self._wire.grow(self._engine, request, take))

    async def _call(self, batch: Sequence[Request], take: Callable[[Reply], None]) -> None:
        asked = [request for request in batch if not isinstance(request, Continuation)]
        sessions = {request.stamp.lease for request in asked}
        if len(sessions) < len(asked) or sessions & self.unanswered:
            self._breaches.append(AssertionError(f"{sorted(sessions)} asked {self._engine!r} before it had answered"))
        self.unanswered |= sessions

        def take_answer(reply: Reply) -> None:
            if reply.stamp.lease in sessions:  # otherwise the reply is to an offer
                sessions.remove(reply.stamp.lease)
                self.unanswered.discard(reply.stamp.lease)
            take(reply)

        try:
            await self._watched(batch, self._wire.call(self._engine, batch, take_answer))
        finally:
            self.unanswered -= sessions

    async def _watched(self, batch: Sequence[Request], call: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                watch = _Watch(self._engine, batch, self._timeout_s, limit)
                try:
                    await call
                finally:
                    watch.end()
        except TimeoutError as error:
            raise WorkerLost(f"{self._engine.engine_id} has not answered for {self._timeout_s:g} s") from error


class _Watch:
    """Ends a call when the engine makes no step for a while or no longer has any of its requests, as a link does."""

    def __init__(
        self, engine: SimEngine[Any, Any], batch: Sequence[Request], silence_s: float, limit: asyncio.Timeout
    ) -> None:
        self._engine = engine
        self._stamps = [request.stamp for request in batch]
        self._silence_s = silence_s
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(silence_s, self._look)

    def _look(self) -> None:
        due_s = self._engine.stepped_s + self._silence_s
        if due_s > self._loop.time() and any(self._engine.has(stamp) for stamp in self._stamps):
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self._limit.reschedule(self._loop.time())

    def end(self) -> None:
        self._timer.cancel()


class SimLease(Generic[Engine]):
    """A lease on one incarnation."""

    def __init__(self, name: str, replica: Replica[Engine], port: SimPort[Any, Any], held: set[str]) -> None:
        self.name = name
        self.epoch = replica.engine.epoch
        self.engine_id = f"{replica.engine.engine_id} epoch {self.epoch}"
        self.port = port
        self._replica = replica
        self._held = held
        held.add(name)
        replica.num_leases += 1

    def release(self) -> None:
        """May be called twice."""
        if self.name in self._held:
            self._held.remove(self.name)
            self._replica.num_leases -= 1


class Fleet(Generic[Engine]):
    """The replicas of one model."""

    def __init__(
        self, kind: str, num_replicas: int, build: Callable[[str, int], Engine], wire: Wire, limits: Limits
    ) -> None:
        epochs = count(1)

        def replica(name: str) -> Replica[Engine]:
            return Replica(name, lambda: build(name, next(epochs)))

        self.replicas = [replica(f"{kind} {index}") for index in range(num_replicas)]
        self.held: set[str] = set()
        """Names of the leases that have not ended."""
        self.kind = kind
        self._wire = wire
        self._limits = limits
        self._numbers = count(1)
        self.ports: dict[int, SimPort[Any, Any]] = {}
        """Connections by epoch, so that all leases on one incarnation share one."""
        self.breaches: list[AssertionError] = []
        """Violations of the protocol by the orchestrator."""

    @property
    def busy_s(self) -> float:
        return sum(replica.busy_s for replica in self.replicas)

    async def take(self, session: str) -> SimLease[Engine]:
        """Take a lease on the replica with the fewest leases. Raises: Unavailable."""
        try:
            async with asyncio.timeout(self._limits.lease_timeout_s):
                await self._wire.grant(self.kind, session)
                replica = await self._alive()
        except TimeoutError as error:
            raise Unavailable(f"no {self.kind} granted a lease") from error
        return SimLease(f"{session}@{self.kind} lease {next(self._numbers)}", replica, self._port(replica), self.held)

    async def _alive(self) -> Replica[Engine]:
        """The living replica with the fewest leases; waits until there is one."""
        while True:
            alive = [replica for replica in self.replicas if not replica.engine.is_dead]
            if alive:
                return min(alive, key=lambda replica: replica.num_leases)
            await asyncio.sleep(GRANT_RETRY_S)

    def _port(self, replica: Replica[Engine]) -> SimPort[Any, Any]:
        epoch = replica.engine.epoch
        if epoch not in self.ports:
            self.ports[epoch] = SimPort(replica.engine, self._wire, self._limits.reply_timeout_s, self.breaches)
        return self.ports[epoch]


class Cluster:
    """All fleets, as `core.ports.Leases`."""

    def __init__(
        self, targets: Fleet[SimTarget], drafts: Fleet[SimDraft], other_drafts: Sequence[Fleet[SimDraft]] = ()
    ) -> None:
        """`other_drafts` serve drafts 1, 2, ...; `drafts` serves draft 0, and all numbers above these."""
        self.targets = targets
        self.drafts = drafts
        self._fleets = dict(enumerate((drafts, *other_drafts)))
        self.fleets: tuple[Fleet[Any], ...] = (targets, drafts, *other_drafts)

    async def take_target(
        self,
        session: str,
        tokens: Sequence[int] = (),  # noqa: ARG002
        adapter: Adapter | None = None,  # noqa: ARG002
    ) -> Lease[TargetPort]:
        return await self.targets.take(session)

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> Lease[DraftPort]:  # noqa: ARG002
        """Take a lease on a draft. Raises: Unavailable, at once if the pair has no draft."""
        fleet = self._fleets.get(draft, self.drafts)
        if not fleet.replicas:
            raise Unavailable("this pair has no draft")
        return await fleet.take(session)
