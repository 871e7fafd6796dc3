"""Who may come in: served at once, after a wait in a bounded queue, or refused before any model work.

One order decides who is served next, and who is refused when the queue is full: by priority, then by how much a caller
has here already, then by arrival. So a caller with many requests delays its own, and others' hardly. Knows callers and
counts; must not know tokens of models or engines.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.config import Limits
from core.errors import DeadlinePassed, OutriderError, Overloaded
from core.ports import Clock
from core.records import GenerationRequest
from orchestrator.quotas import Quotas

MAX_WAITS = 4096
"""Admissions that are remembered until somebody asks for a report."""
RECENT_COMPLETIONS = 16
"""Completions over which the time that a place is taken is averaged: it foretells how long the queue takes."""


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The queue at the moment, and who has left it since the last report."""

    num_waiting: int
    expected_wait_s: float
    """Of a request that came now."""
    waited_s: tuple[float, ...]
    """Of each that has been admitted since the last report, 0 for those that found a place free."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request in the queue. `turn` is done when it has a place, or an error when it gets none."""

    caller: str
    priority: int
    number: int
    turn: asyncio.Future[None]

    def refuse(self, error: OutriderError) -> None:
        if not self.turn.done():  # else it has been cancelled this moment, and is about to leave
            self.turn.set_exception(error)


class Admission:
    """The places for completions of one orchestrator, and the queue for them.

    Invariant: no place is free while somebody waits.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._quotas = Quotas(limits, clock)
        self._running: Counter[str] = Counter()
        """Places that each caller has."""
        self._waiting: list[_Waiting] = []
        self._num_arrived = 0
        self._place_s = 0.0
        """For how long a completion has its place, on average; 0 before one has ended."""
        self._waited_s: deque[float] = deque(maxlen=MAX_WAITS)

    @property
    def num_admitted(self) -> int:
        """Completions in progress, those that wait not counted."""
        return self._running.total()

    @property
    def expected_wait_s(self) -> float:
        """Until a request that came now would have a place."""
        if self.num_admitted < self._limits.max_sessions:
            return 0.0
        return (1 + len(self._waiting)) * self._place_s / self._limits.max_sessions

    def report(self) -> QueueReport:
        """What there is to tell since the last time."""
        waited_s = tuple(self._waited_s)
        self._waited_s.clear()
        return QueueReport(len(self._waiting), self.expected_wait_s, waited_s)

    @asynccontextmanager
    async def place(self, request: GenerationRequest) -> AsyncGenerator[None, None]:
        """A place until the end of the block, after a wait if there is a queue.

        Raises: Overloaded when there is no room, or the caller has had its share; DeadlinePassed while it waits.
        """
        self._quotas.take(request)
        arrived_s = self._clock.now()
        try:
            await self._enter(request)
        except BaseException:
            self._quotas.undo(request)
            raise
        began_s = self._clock.now()
        self._waited_s.append(began_s - arrived_s)
        try:
            yield
        finally:
            self._leave(request.caller, self._clock.now() - began_s)

    def ended(self, request: GenerationRequest, num_tokens: int) -> None:
        """The completion has ended after `num_tokens` of output: what it did not use counts against no quota."""
        self._quotas.settle(request, num_tokens)

    def refuse_waiting(self, error: OutriderError) -> None:
        """Nobody is admitted any more: those who wait are told so."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.refuse(error)

    async def _enter(self, request: GenerationRequest) -> None:
        if self.num_admitted < self._limits.max_sessions:
            self._running[request.caller] += 1
            return
        waiting = self._queue(request)
        try:
            await self._until_turn(waiting, request.deadline)
        except BaseException:
            self._give_up(waiting)
            raise

    def _queue(self, request: GenerationRequest) -> _Waiting:
        """Raises: Overloaded when the queue is full of those who come before this one."""
        self._num_arrived += 1
        turn = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request.caller, request.priority, self._num_arrived, turn)
        self._waiting.append(waiting)
        if len(self._waiting) > self._limits.max_queued:
            last = self._last(waiting)
            self._waiting.remove(last)
            if last is waiting:
                raise self._refusal()
            last.refuse(self._refusal())
        return waiting

    def _last(self, newest: _Waiting) -> _Waiting:
        """Who is refused where one is too many: of the least priority, from the caller with most, the newest.

        A request that waits already stays before the newest one of a caller that would then have as much.
        """
        shares = self._running + Counter(each.caller for each in self._waiting)
        return max(self._waiting, key=lambda each: (each.priority, shares[each.caller], each is newest, each.number))

    def _next(self) -> _Waiting | None:
        """Not of those that have been cancelled this moment, and are about to leave."""
        waiting = (each for each in self._waiting if not each.turn.done())
        return min(waiting, key=lambda each: (each.priority, self._running[each.caller], each.number), default=None)

    async def _until_turn(self, waiting: _Waiting, deadline: float | None) -> None:
        if deadline is None:
            await waiting.turn
            return
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, deadline - self._clock.now())))
        try:
            await asyncio.wait({waiting.turn, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        if not waiting.turn.done():
            raise DeadlinePassed("the request's time ran out while it waited for a place")
        waiting.turn.result()

    def _give_up(self, waiting: _Waiting) -> None:
        """It waits no more; a place that it was given in the same moment goes to the next."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
            self._free(waiting.caller)

    def _leave(self, caller: str, place_s: float) -> None:
        self._place_s += (place_s - self._place_s) / RECENT_COMPLETIONS if self._place_s else place_s
        self._free(caller)

    def _free(self, caller: str) -> None:
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        if (chosen := self._next()) is not None:
            self._waiting.remove(chosen)
            self._running[chosen.caller] += 1
            chosen.turn.set_result(None)

    def _refusal(self) -> Overloaded:
        limits, wait_s = self._limits, max(self._limits.retry_after_s, self.expected_wait_s)
        queue = f" and {limits.max_queued} requests wait for one" if limits.max_queued else ""
        return Overloaded(
            f"all {limits.max_sessions} places are taken{queue}; try again in {wait_s:.3g} s, the expected wait", wait_s
        )
