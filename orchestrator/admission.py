"""Admission control: requests are served at once, wait in a bounded queue, or are refused before any model work.

Calls are ordered by priority, then by the number of places that their caller has, then by arrival. The first is served
next; if the queue is full, the last is refused. A caller with many requests thus mostly delays its own. The samples of
one call are admitted together or not at all.

Knows callers and counts; must not know tokens of models or engines.
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
"""Maximum number of admissions kept for the next report."""


@dataclass(frozen=True, slots=True)
class QueueReport:
    """Current queue, and the waits of requests admitted since the last report."""

    num_waiting: int
    expected_wait_s: float
    """Expected wait in seconds of a request that arrives now."""
    waited_s: tuple[float, ...]
    """Wait in seconds of each request admitted since the last report; 0 if a place was free."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call in the queue. `turn` completes when the call has its places, or fails when it is refused."""

    caller: str
    priority: int
    number: int
    num_places: int
    limit: int
    """Maximum number of places of its caller at once; 0 for no limit."""
    turn: asyncio.Future[None]

    def refuse(self, error: OutriderError) -> None:
        if not self.turn.done():  # otherwise it was just cancelled, and is about to leave
            self.turn.set_exception(error)


class Place:
    """Permission for one completion to run. It is released once."""

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
        """Number of output tokens so far."""

    @property
    def age_s(self) -> float:
        return self._admission.now() - self._began_s

    def left_s(self, times: PlaceTimes) -> float:
        """Return the expected seconds until the place is free."""
        return times.left_s(self.age_s, self.num_tokens, self.max_tokens)

    def leave(self, num_tokens: int = 0) -> None:
        """Release the place after `num_tokens` of output. Unused tokens are returned to the quota."""
        if not self._is_left:
            self._is_left = True
            self.num_tokens = num_tokens
            self._charge.settle(self._index, len(self._request.prompt) + num_tokens)
            self._admission.leave(self)


class Admission:
    """Places for the completions of one orchestrator, and the queue for them.

    Invariant: the free places are fewer than the first call in the queue needs. Calls whose callers are at their limit
    are skipped. A call for several samples therefore waits behind no later call, and free places are kept for it.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._quotas = Quotas(limits, clock)
        self._running: Counter[str] = Counter()
        """Number of places of each caller."""
        self._waiting: list[_Waiting] = []
        self._num_arrived = 0
        self._places: set[Place] = set()
        """Taken places."""
        self._times = PlaceTimes()
        self._waited_s: deque[float] = deque(maxlen=MAX_WAITS)

    @property
    def num_admitted(self) -> int:
        """Number of completions in progress, without those in the queue."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Number of completions in the queue, counting every sample of a call."""
        return sum(each.num_places for each in self._waiting)

    @property
    def expected_wait_s(self) -> float:
        """Expected wait in seconds of a request that arrives now."""
        return self._forecast_s(self.num_waiting, 1)

    @property
    def full_wait_s(self) -> float:
        """Expected wait in seconds with every place taken and the queue full."""
        return self._forecast_s(self._limits.max_queued, 1, is_full=True)

    def now(self) -> float:
        """Return the time in seconds, by the clock that times places."""
        return self._clock.now()

    def report(self) -> QueueReport:
        """Return the queue's state, and the waits since the last report."""
        waited_s = tuple(self._waited_s)
        self._waited_s.clear()
        return QueueReport(self.num_waiting, self.expected_wait_s, waited_s)

    @asynccontextmanager
    async def places(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[list[Place], None]:
        """Take a place for each sample of one call, waiting in the queue if necessary.

        Places that were not released before are released at the end of the `async with` block.
        Raises: Overloaded if there is no room for all, or the caller is at its limit; DeadlinePassed while waiting.
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
        """Free a place. Called by `Place` only."""
        self._times.ended(place.age_s, place.num_tokens, place.max_tokens)
        self._places.discard(place)
        self._free(place.caller, 1)

    def refuse_waiting(self, error: OutriderError) -> None:
        """Refuse all waiting calls with this error."""
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
        """Add a call to the queue.

        Raises: Overloaded if the queue is full of calls that come before this one.
        """
        self._num_arrived += 1
        turn = asyncio.get_running_loop().create_future()
        limit = own_or(request.quota.max_sessions, self._limits.max_sessions_per_caller)
        newest = _Waiting(request.caller, request.priority, self._num_arrived, num_places, limit, turn)
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
        """Return the calls that do not fit into the queue; the newest call alone, if it is among them.

        Drops the lowest priority first, then the caller with the most places, running and waiting; on a tie, the newest
        call.
        """
        max_queued, left, refused = self._limits.max_queued, list(self._waiting), list[_Waiting]()
        if newest.num_places > max_queued:
            return [newest]
        shares = self._running + self._waiting_places()
        while sum(each.num_places for each in left) > max_queued:
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
        """Admit calls in order, as long as there are enough places."""
        while (first := self._next()) is not None:
            if self.num_admitted + first.num_places > self._limits.max_sessions:
                return
            self._waiting.remove(first)
            self._running[first.caller] += first.num_places
            first.turn.set_result(None)

    def _next(self) -> _Waiting | None:
        """Return the next call, skipping cancelled calls and callers at their limit."""
        waiting = (each for each in self._waiting if not each.turn.done() and not self._exceeds_share(each))
        return min(waiting, key=lambda each: (each.priority, self._running[each.caller], each.number), default=None)

    def _exceeds_share(self, waiting: _Waiting) -> bool:
        """Whether the call would exceed its caller's limit."""
        return 0 < waiting.limit < self._running[waiting.caller] + waiting.num_places

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
        """Remove a call from the queue, or free the places that it was just given."""
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
        """Return the expected seconds until a call has its places. `is_full`: assume that no place is free now."""
        left_s = [place.left_s(self._times) for place in self._places]
        usual_s = self._times.average_s
        if left_s:  # average duration of the completions in progress
            usual_s = (sum(place.age_s for place in self._places) + sum(left_s)) / len(left_s)
        num_free = max(0, self._limits.max_sessions - len(left_s))
        return until_free_s([*left_s, *[usual_s if is_full else 0.0] * num_free], usual_s, num_before, num_places)

    def _share_wait_s(self, refused: _Waiting) -> float:
        """Return the expected seconds until enough of the caller's own places are free."""
        left_s = sorted(place.left_s(self._times) for place in self._places if place.caller == refused.caller)
        num_too_many = self._running[refused.caller] + refused.num_places - refused.limit
        return left_s[min(num_too_many, len(left_s)) - 1] if left_s else 0.0

    def _refusal(self, refused: _Waiting) -> Overloaded:
        limits, num_places = self._limits, refused.num_places
        if self._exceeds_share(refused):
            problem = f"this caller has {self._running[refused.caller]} of the {refused.limit} places that it may have"
            wait_s = max(limits.retry_after_s, self._share_wait_s(refused))
            return Overloaded(f"{problem}; try again in {wait_s:.3g} s, the expected wait", wait_s)
        wait_s = max(limits.retry_after_s, self._forecast_s(self.num_waiting, num_places))
        taken = "all" if self.num_admitted == limits.max_sessions else f"{self.num_admitted} of"
        asked = "" if num_places == 1 else f"; all {num_places} samples of a call start together or none"
        queue = f" and {self.num_waiting} requests wait for one" if limits.max_queued else ""
        problem = f"{taken} {limits.max_sessions} places are taken{queue}{asked}"
        return Overloaded(f"{problem}; try again in {wait_s:.3g} s, the expected wait", wait_s)
