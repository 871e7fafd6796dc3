"""Quotas per caller and minute for requests and tokens: one token bucket each, full at first.

The limits come from the caller's key, or else the settings. Knows callers and counts. Orchestrators count separately:
each grants the whole quota.
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
"""Maximum number of callers tracked. Beyond it, callers with full buckets are dropped."""


@dataclass(slots=True)
class _Bucket:
    """Token bucket with a capacity of `limit`, refilled at `limit` a minute."""

    limit: int
    left: float
    filled_s: float

    def hold(self, limit: int) -> None:
        """Change the capacity, because the quota changed or the caller used another key. The fill ratio stays."""
        self.left *= limit / self.limit
        self.limit = limit

    def fill(self, now_s: float) -> None:
        self.left = min(self.limit, self.left + (now_s - self.filled_s) * self.limit / MINUTE_S)
        self.filled_s = now_s

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available."""
        return max(0.0, amount - self.left) * MINUTE_S / self.limit


def own_or(own: int | None, of_all: int) -> int:
    """Return the caller's own limit if its key has one, else the general limit."""
    return of_all if own is None else own


class Quotas:
    """The quotas of all callers. 0 means no quota."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, dict[str, _Bucket]] = {}

    def take(self, requests: Sequence[GenerationRequest]) -> Charge:
        """Charge the samples of one call, each for its prompt and its maximum or expected outputs.

        An amount larger than a quota is charged as the whole quota.
        Raises: Overloaded if too little is left for all samples; nothing is then charged.
        """
        caller = requests[0].caller
        buckets = self._of(caller, self._limits_of(requests[0].quota))
        costs = [
            len(request.prompt) + request.num_outputs * own_or(request.expected_tokens, request.max_tokens)
            for request in requests
        ]
        asked = {"requests": len(requests), "tokens": sum(costs)}
        counted = {name: float(min(asked[name], bucket.limit)) for name, bucket in buckets.items()}
        for name, amount in counted.items():
            if wait_s := buckets[name].wait_s(amount):
                raise Overloaded(
                    f"the quota of {buckets[name].limit} {name} a minute is used up; try again in {wait_s:.3g} s",
                    wait_s,
                )
        for name, amount in counted.items():
            buckets[name].left -= amount
        return Charge(self, caller, costs, counted, {name: bucket.limit for name, bucket in buckets.items()})

    def give_back(self, caller: str, name: str, amount: float, limit: int) -> None:
        """Return unused tokens or requests of a quota of `limit`. If the quota has changed, the amount is scaled with
        it.

        `amount` is negative if the request used more than was charged. The balance may become negative, too, until it
        is refilled.
        """
        if (bucket := self._buckets.get(caller, {}).get(name)) is not None:
            bucket.left += amount * bucket.limit / limit  # every reader fills the bucket first, which caps it

    def _limits_of(self, own: Quota) -> dict[str, int]:
        limits = self._limits
        return {
            "requests": own_or(own.max_requests_per_minute, limits.max_requests_per_minute),
            "tokens": own_or(own.max_tokens_per_minute, limits.max_tokens_per_minute),
        }

    def _of(self, caller: str, limits: Mapping[str, int]) -> dict[str, _Bucket]:
        """Return the caller's buckets, filled up to now; no bucket for 0."""
        now_s = self._clock.now()
        if caller not in self._buckets and len(self._buckets) >= MAX_CALLERS:
            self._forget(now_s)
        before = self._buckets.get(caller, {})
        buckets = self._buckets[caller] = {
            name: before.get(name) or _Bucket(amount, amount, now_s) for name, amount in limits.items() if amount
        }
        for name, bucket in buckets.items():
            bucket.fill(now_s)
            bucket.hold(limits[name])
        return buckets

    def _forget(self, now_s: float) -> None:
        for caller, buckets in list(self._buckets.items()):
            for bucket in buckets.values():
                bucket.fill(now_s)
            if all(bucket.left >= bucket.limit for bucket in buckets.values()):
                del self._buckets[caller]


@dataclass(slots=True)
class Charge:
    """The amounts charged to a caller's quotas for one call. Each sample is charged as requested until it ends."""

    _quotas: Quotas
    _caller: str
    _costs: list[int]
    """Charged tokens of each sample."""
    _counted: dict[str, float]
    """Charged amount by quota, each at most the whole quota."""
    _limits: dict[str, int]
    """Capacity of each quota when it was charged."""

    def settle(self, index: int, num_tokens: int) -> None:
        """Set the cost of sample `index` to `num_tokens`, prompt and output. Return or charge the difference."""
        self._costs[index] = num_tokens
        if (counted := self._counted.get("tokens")) is not None:
            self._counted["tokens"] = min(self._limits["tokens"], sum(self._costs))
            self._give_back("tokens", counted - self._counted["tokens"])

    def undo(self) -> None:
        """Return everything, since the call was not served."""
        for name, amount in self._counted.items():
            self._give_back(name, amount)

    def _give_back(self, name: str, amount: float) -> None:
        if amount:
            self._quotas.give_back(self._caller, name, amount, self._limits[name])
