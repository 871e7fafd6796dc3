"""How much each caller may ask for in a minute: requests, and tokens. A token bucket each, full at first.

Knows callers and counts. Every orchestrator counts by itself: of several, each grants the quota.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config import Limits
from core.errors import Overloaded
from core.ports import Clock
from core.records import GenerationRequest

MINUTE_S = 60.0
MAX_CALLERS = 4096
"""Callers that are remembered, before those are forgotten who have their whole quota again."""


@dataclass(slots=True)
class _Bucket:
    """What is left of a quota of `most` a minute. It fills steadily."""

    most: int
    left: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        self.left = min(self.most, self.left + (now_s - self.filled_s) * self.most / MINUTE_S)
        self.filled_s = now_s

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there."""
        return max(0.0, amount - self.left) * MINUTE_S / self.most


class Quotas:
    """The quotas of all callers. A setting of 0 is no quota."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._most = {"requests": limits.max_requests_per_minute, "tokens": limits.max_tokens_per_minute}
        self._clock = clock
        self._buckets: dict[str, dict[str, _Bucket]] = {}

    def take(self, request: GenerationRequest) -> None:
        """Count the request and all tokens that it may come to: prompt and `max_tokens`.

        What is larger than a whole quota needs a whole quota. Raises: Overloaded, and counts nothing, when too little
        is left.
        """
        buckets = self._of(request.caller)
        asked = {
            name: float(min(amount, buckets[name].most)) for name, amount in _cost(request).items() if name in buckets
        }
        for name, amount in asked.items():
            if wait_s := buckets[name].wait_s(amount):
                raise Overloaded(
                    f"the quota of {buckets[name].most} {name} a minute is used up; try again in {wait_s:.3g} s", wait_s
                )
        for name, amount in asked.items():
            buckets[name].left -= amount

    def settle(self, request: GenerationRequest, num_tokens: int) -> None:
        """The request has ended after `num_tokens` of output: what was counted beyond these is given back."""
        if (bucket := self._of(request.caller).get("tokens")) is not None:
            num_counted = min(_cost(request)["tokens"], bucket.most)
            num_unused = max(0, num_counted - len(request.prompt) - num_tokens)
            bucket.left = min(bucket.most, bucket.left + num_unused)

    def undo(self, request: GenerationRequest) -> None:
        """The request has not been served: it counts against no quota."""
        for name, bucket in self._of(request.caller).items():
            bucket.left = min(bucket.most, bucket.left + _cost(request)[name])

    def _of(self, caller: str) -> dict[str, _Bucket]:
        """The caller's buckets, as full as they are now."""
        now_s = self._clock.now()
        if caller not in self._buckets:
            if len(self._buckets) >= MAX_CALLERS:
                self._forget(now_s)
            self._buckets[caller] = {name: _Bucket(most, most, now_s) for name, most in self._most.items() if most}
        buckets = self._buckets[caller]
        for bucket in buckets.values():
            bucket.fill(now_s)
        return buckets

    def _forget(self, now_s: float) -> None:
        for caller, buckets in list(self._buckets.items()):
            for bucket in buckets.values():
                bucket.fill(now_s)
            if all(bucket.left >= bucket.most for bucket in buckets.values()):
                del self._buckets[caller]


def _cost(request: GenerationRequest) -> dict[str, int]:
    return {"requests": 1, "tokens": len(request.prompt) + request.max_tokens}
