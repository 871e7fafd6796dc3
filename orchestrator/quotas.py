"""How much each caller may ask for in a minute: requests, and tokens. A token bucket each, full at first.

How much that is, the caller's key says with each request, else the settings. Knows callers and counts. Every
orchestrator counts by itself: of several, each grants the quota.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.config import Limits
from core.errors import Overloaded
from core.ports import Clock
from core.records import GenerationRequest, Quota

MINUTE_S = 60.0
MAX_CALLERS = 4096
"""Callers that are remembered, before those are forgotten who have their whole quota again."""


@dataclass(slots=True)
class _Bucket:
    """What is left of a quota of `most` a minute. It fills steadily."""

    most: int
    left: float
    filled_s: float

    def hold(self, most: int) -> None:
        """The quota has changed, or another key of the caller has another: the same share of it is left."""
        self.left *= most / self.most
        self.most = most

    def fill(self, now_s: float) -> None:
        self.left = min(self.most, self.left + (now_s - self.filled_s) * self.most / MINUTE_S)
        self.filled_s = now_s

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there."""
        return max(0.0, amount - self.left) * MINUTE_S / self.most


def own_or(own: int | None, of_all: int) -> int:
    """A caller's own limit, where its key has one."""
    return of_all if own is None else own


class Quotas:
    """The quotas of all callers. 0 is no quota."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, dict[str, _Bucket]] = {}

    def take(self, requests: Sequence[GenerationRequest]) -> Charge:
        """Count the samples of one call, each with its prompt and the output that it may have or is expected to have.

        What is larger than a whole quota needs a whole quota. Raises: Overloaded, and counts nothing, when too little
        is left for all of them.
        """
        caller = requests[0].caller
        buckets = self._of(caller, self._most(requests[0].quota))
        costs = [len(request.prompt) + own_or(request.expected_tokens, request.max_tokens) for request in requests]
        asked = {"requests": len(requests), "tokens": sum(costs)}
        counted = {name: float(min(asked[name], bucket.most)) for name, bucket in buckets.items()}
        for name, amount in counted.items():
            if wait_s := buckets[name].wait_s(amount):
                raise Overloaded(
                    f"the quota of {buckets[name].most} {name} a minute is used up; try again in {wait_s:.3g} s", wait_s
                )
        for name, amount in counted.items():
            buckets[name].left -= amount
        return Charge(self, caller, costs, counted, {name: bucket.most for name, bucket in buckets.items()})

    def give_back(self, caller: str, name: str, amount: float, most: int) -> None:
        """What was counted of a quota of `most`, and is not used: the same share, where the quota is another by now.

        Less than nothing where more was used than had been counted; what is left of the quota may be less than
        nothing, too, until enough time has passed.
        """
        if (bucket := self._buckets.get(caller, {}).get(name)) is not None:
            bucket.left += amount * bucket.most / most  # whoever reads it fills it first, which bounds it

    def _most(self, own: Quota) -> dict[str, int]:
        limits = self._limits
        return {
            "requests": own_or(own.max_requests_per_minute, limits.max_requests_per_minute),
            "tokens": own_or(own.max_tokens_per_minute, limits.max_tokens_per_minute),
        }

    def _of(self, caller: str, most: Mapping[str, int]) -> dict[str, _Bucket]:
        """The caller's buckets, as full as they are now; none where there is no quota."""
        now_s = self._clock.now()
        if caller not in self._buckets and len(self._buckets) >= MAX_CALLERS:
            self._forget(now_s)
        before = self._buckets.get(caller, {})
        buckets = self._buckets[caller] = {
            name: before.get(name) or _Bucket(amount, amount, now_s) for name, amount in most.items() if amount
        }
        for name, bucket in buckets.items():
            bucket.fill(now_s)
            bucket.hold(most[name])
        return buckets

    def _forget(self, now_s: float) -> None:
        for caller, buckets in list(self._buckets.items()):
            for bucket in buckets.values():
                bucket.fill(now_s)
            if all(bucket.left >= bucket.most for bucket in buckets.values()):
                del self._buckets[caller]


@dataclass(slots=True)
class Charge:
    """What one call counts against its caller's quotas: each sample as it was asked for, until it ends."""

    _quotas: Quotas
    _caller: str
    _costs: list[int]
    """Tokens of each sample."""
    _counted: dict[str, float]
    """At most a whole quota of each."""
    _most: dict[str, int]
    """The quotas that these were counted against."""

    def settle(self, index: int, num_tokens: int) -> None:
        """Sample `index` has cost `num_tokens`, prompt and output: what was counted beyond these is given back, and
        what was not expected is counted.
        """
        self._costs[index] = num_tokens
        if (counted := self._counted.get("tokens")) is not None:
            self._counted["tokens"] = min(self._most["tokens"], sum(self._costs))
            self._give_back("tokens", counted - self._counted["tokens"])

    def undo(self) -> None:
        """The call has not been served: it counts against no quota."""
        for name, amount in self._counted.items():
            self._give_back(name, amount)

    def _give_back(self, name: str, amount: float) -> None:
        if amount:
            self._quotas.give_back(self._caller, name, amount, self._most[name])
