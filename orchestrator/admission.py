"""Who may come in: served at once, after a wait in a bounded queue, or refused before any model work.

One order decides who is served next, and who is refused when the queue is full: by priority, then by how much a caller
has here already, then by arrival. So a caller with many requests delays its own, and others' hardly. The samples of
one call come in together or not at all. Knows callers and counts; must not know tokens of models or engines.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.config import Limits
from core.errors import DeadlinePassed, OutriderError, Overloaded
from core.ports import Clock
from core.records import GenerationRequest
from orchestrator.quotas import Charge, Quotas, own_or
from orchestrator.waits import PlaceTimes, until_free_s

MAX_WAITS = 4096
"""Admissions that are remembered until somebody asks for a report."""


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The queue at the moment, and the waits of those that were admitted since the last report."""

    num_waiting: int
    expected_wait_s: float
    """Of a request that came now."""
    waited_s: tuple[float, ...]
    """Of each that has been admitted since the last report, 0 for those that found a place free."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call in the queue. `turn` is done when it has its places, or an error when it gets none."""

    caller: str
    priority: int
    number: int
    num_places: int
    most: int
    """Places that its caller may have at once; 0 sets no limit."""
    turn: asyncio.Future[None]

    def refuse(self, error: OutriderError) -> None:
        if not self.turn.done():  # else it has been cancelled this moment, and is about to leave
            self.turn.set_exception(error)


class Place:
    """The place of one completion: it is left once."""

    def __init__(self, admission: Admission, request: GenerationRequest, charge: Charge, index: int) -> None:
        self._admission = admission
        self._request = request
        self.caller = request.caller
        self.max_tokens = request.max_tokens - len(request.resume_tokens)
        self._charge = charge
        self._index = index
        self._began_s = admission.now()
        self._is_left = False
        self.num_tokens = 0
        """Of output so far."""

    @property
    def age_s(self) -> float:
        return self._admission.now() - self._began_s

    def left_s(self, times: PlaceTimes) -> float:
        """Until the place is free again, as far as can be told."""
        return times.left_s(self.age_s, self.num_tokens, self.max_tokens)

    def leave(self, num_tokens: int = 0) -> None:
        """The completion has ended after `num_tokens` of output: what it did not use counts against no quota."""
        if not self._is_left:
            self._is_left = True
            self.num_tokens = num_tokens
            self._charge.settle(self._index, len(self._request.prompt) + num_tokens)
            self._admission.leave(self)


class Admission:
    """The places for completions of one orchestrator, and the queue for them.

    Invariant: fewer places are free than the first of the queue needs, those apart whose callers have all that they
    may. So a call for several waits behind no later one, and places stay free for it meanwhile.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._quotas = Quotas(limits, clock)
        self._running: Counter[str] = Counter()
        """Places that each caller has."""
        self._waiting: list[_Waiting] = []
        self._num_arrived = 0
        self._places: set[Place] = set()
        """Those that are taken."""
        self._times = PlaceTimes()
        self._waited_s: deque[float] = deque(maxlen=MAX_WAITS)

    @property
    def num_admitted(self) -> int:
        """Completions in progress, those that wait not counted."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a place: of a call with several samples each."""
        return sum(each.num_places for each in self._waiting)

    @property
    def expected_wait_s(self) -> float:
        """Until a request that came now would have a place."""
        return self._forecast_s(self.num_waiting, 1)

    @property
    def full_wait_s(self) -> float:
        """The same once all places and the queue are full."""
        return self._forecast_s(self._limits.max_queued, 1, is_full=True)

    def now(self) -> float:
        """Seconds on the clock by which places are taken."""
        return self._clock.now()

    def report(self) -> QueueReport:
        """What there is to tell since the last time."""
        waited_s = tuple(self._waited_s)
        self._waited_s.clear()
        return QueueReport(self.num_waiting, self.expected_wait_s, waited_s)

    @asynccontextmanager
    async def places(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[list[Place], None]:
        """A place for each sample of one call, after a wait if there is a queue; left with the block at the latest.

        Raises: Overloaded when there is no room for all, or the caller has had its share; DeadlinePassed while it
        waits. Nothing is counted then.
        """
        charge = self._quotas.take(requests)
        arrived_s = self.now()
        try:
            await self._enter(requests[0], len(requests))
        except BaseException:
            charge.undo()
            raise
        self._waited_s.extend([self.now() - arrived_s] * len(requests))
        places = [Place(self, request, charge, index) for index, request in enumerate(requests)]
        self._places.update(places)
        try:
            yield places
        finally:
            for place in places:
                place.leave()

    def leave(self, place: Place) -> None:
        """A place is free again; for `Place` alone."""
        self._times.ended(place.age_s, place.num_tokens, place.max_tokens)
        self._places.discard(place)
        self._free(place.caller, 1)

    def refuse_waiting(self, error: OutriderError) -> None:
        """Nobody is admitted any more: those who wait are told so."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.refuse(error)

    async def _enter(self, request: GenerationRequest, num_places: int) -> None:
        waiting = self._queue(request, num_places)
        try:
            await self._until_turn(waiting, request.deadline)
        except BaseException:
            self._give_up(waiting)
            raise

    def _queue(self, request: GenerationRequest, num_places: int) -> _Waiting:
        """Raises: Overloaded when the queue is full of those who come before this one."""
        self._num_arrived += 1
        turn = asyncio.get_running_loop().create_future()
        most = own_or(request.quota.max_sessions, self._limits.max_sessions_per_caller)
        newest = _Waiting(request.caller, request.priority, self._num_arrived, num_places, most, turn)
        self._waiting.append(newest)
        self._admit()
        if newest not in self._waiting:
            return newest
        refused = self._too_many(newest)
        if newest in refused:
            self._waiting.remove(newest)
            raise self._refusal(newest)
        for last in refused:
            self._waiting.remove(last)
            last.refuse(self._refusal(last))
        if refused:
            self._admit()
        return newest

    def _too_many(self, newest: _Waiting) -> list[_Waiting]:
        """Those for whom the queue has no room: the newest alone, if it is among them.

        Of the least priority first, then from the caller with most, then the newest. A call that waits already stays
        before the newest one of a caller that would then have as much.
        """
        most, left, refused = self._limits.max_queued, list(self._waiting), list[_Waiting]()
        if newest.num_places > most:
            return [newest]
        shares = self._running + self._waiting_places()
        while sum(each.num_places for each in left) > most:
            last = max(left, key=lambda each: (each.priority, shares[each.caller], each is newest, each.number))
            if last is newest:
                return [newest]
            left.remove(last)
            shares[last.caller] -= last.num_places
            refused.append(last)
        return refused

    def _waiting_places(self) -> Counter[str]:
        counted = Counter[str]()
        for each in self._waiting:
            counted[each.caller] += each.num_places
        return counted

    def _admit(self) -> None:
        """Give places to the first of the queue, and to the next, as long as there are enough."""
        while (first := self._next()) is not None:
            if self.num_admitted + first.num_places > self._limits.max_sessions:
                return
            self._waiting.remove(first)
            self._running[first.caller] += first.num_places
            first.turn.set_result(None)

    def _next(self) -> _Waiting | None:
        """Not of those that have been cancelled this moment, and are about to leave, or whose caller has its share."""
        waiting = (each for each in self._waiting if not each.turn.done() and not self._has_share(each))
        return min(waiting, key=lambda each: (each.priority, self._running[each.caller], each.number), default=None)

    def _has_share(self, waiting: _Waiting) -> bool:
        """Whether its caller would have more than it may."""
        return 0 < waiting.most < self._running[waiting.caller] + waiting.num_places

    async def _until_turn(self, waiting: _Waiting, deadline: float | None) -> None:
        if deadline is None or waiting.turn.done():
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
        """It waits no more; places that it was given in the same moment go to the next."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._admit()
        elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
            self._free(waiting.caller, waiting.num_places)

    def _free(self, caller: str, num_places: int) -> None:
        self._running[caller] -= num_places
        if not self._running[caller]:
            del self._running[caller]
        self._admit()

    def _forecast_s(self, num_before: int, num_places: int, *, is_full: bool = False) -> float:
        """Until a call has its places behind others; `is_full`: as if places that are free had just been taken."""
        left_s = [place.left_s(self._times) for place in self._places]
        usual_s = self._times.average_s
        if left_s:  # as those in progress will take
            usual_s = (sum(place.age_s for place in self._places) + sum(left_s)) / len(left_s)
        num_free = max(0, self._limits.max_sessions - len(left_s))
        return until_free_s([*left_s, *[usual_s if is_full else 0.0] * num_free], usual_s, num_before, num_places)

    def _share_wait_s(self, refused: _Waiting) -> float:
        """Until enough of its caller's own places are free."""
        left_s = sorted(place.left_s(self._times) for place in self._places if place.caller == refused.caller)
        num_too_many = self._running[refused.caller] + refused.num_places - refused.most
        return left_s[min(num_too_many, len(left_s)) - 1] if left_s else 0.0

    def _refusal(self, refused: _Waiting) -> Overloaded:
        limits, num_places = self._limits, refused.num_places
        if self._has_share(refused):
            told = f"this caller has {self._running[refused.caller]} of the {refused.most} places that it may have"
            wait_s = max(limits.retry_after_s, self._share_wait_s(refused))
            return Overloaded(f"{told}; try again in {wait_s:.3g} s, the expected wait", wait_s)
        wait_s = max(limits.retry_after_s, self._forecast_s(self.num_waiting, num_places))
        taken = "all" if self.num_admitted == limits.max_sessions else f"{self.num_admitted} of"
        asked = "" if num_places == 1 else f"; all {num_places} samples of a call start together or none"
        queue = f" and {self.num_waiting} requests wait for one" if limits.max_queued else ""
        told = f"{taken} {limits.max_sessions} places are taken{queue}{asked}"
        return Overloaded(f"{told}; try again in {wait_s:.3g} s, the expected wait", wait_s)
