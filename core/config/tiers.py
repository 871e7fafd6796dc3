"""Settings of service tiers: a request names a tier and gets its priority in the queue."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import Settings, whole
from core.records import PRIORITY


@dataclass(frozen=True, slots=True)
class ServiceTiers(Settings):
    """Priorities of the service tiers. The tier `default`, and requests without tier and priority, have 0."""

    flex: int = 10
    """Priority of requests of the service tier `flex`, in [0, 2147483647]: they are served after others, and refused
    first where the queue is full. Raise it where requests of the tier `default` send priorities above 10 themselves."""
    priority: int = -10
    """Priority of requests of the service tier `priority`, in [-2147483648, 0]: they are served before others, and
    refused unless the caller's key (max_priority) or `limits.max_priority` allows this priority. Change it where
    requests with priorities of their own must go before them, or after."""

    def priority_of(self, tier: str) -> int:
        """Priority of a tier; 0 if the tier has none of its own."""
        return {"flex": self.flex, "priority": self.priority}.get(tier, 0)

    def __post_init__(self) -> None:
        self._check(whole(0, PRIORITY.high), "flex")
        self._check(whole(PRIORITY.low, 0), "priority")
