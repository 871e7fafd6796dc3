"""Settings of autoscaling, by deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Between which counts the replicas of a deployment follow its load, and how soon."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    max_replicas: int
    min_replicas: int = 1
    """0 lets the last replica go when nothing is asked of it."""
    upscale_delay_s: float = 10.0
    """More replicas must have been wanted for this long; the first one, from none, is started at once."""
    downscale_delay_s: float = 600.0
    """Fewer replicas must have been wanted for this long."""
    window_s: float = 20.0
    """Load is averaged over this time; replicas report every ten seconds."""

    def __post_init__(self) -> None:
        check(self.min_replicas >= 0, "min_replicas", "at least 0", self.min_replicas)
        least = max(1, self.min_replicas)
        check(self.max_replicas >= least, "max_replicas", f"at least {least}", self.max_replicas)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check(self.window_s > 10, "window_s", "above 10", self.window_s)


@dataclass(frozen=True, slots=True)
class OrchestratorScaling(Autoscaling):
    """Orchestrators follow the requests in progress."""

    sessions: float = 64.0
    """Requests in progress that one orchestrator is meant to have."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        check(self.sessions > 0, "sessions", "positive", self.sessions)
        check(self.min_replicas >= 1, "min_replicas", "at least 1: orchestrators take the calls", self.min_replicas)


@dataclass(frozen=True, slots=True)
class TargetScaling(Autoscaling):
    """Targets follow the sessions that they hold and the KV that these fill, whichever asks for more."""

    sessions: float = 32.0
    """Live sessions that one replica is meant to have, those that wait for a place included."""
    kv_use: float = 0.8
    """Share of its KV that one replica is meant to have in use."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        check(self.sessions > 0, "sessions", "positive", self.sessions)
        check(0 < self.kv_use <= 1, "kv_use", "in (0, 1]", self.kv_use)


@dataclass(frozen=True, slots=True)
class DraftScaling(Autoscaling):
    """Drafts follow their own utilisation and the time that verification waits for them.

    Not the length of a queue: a draft that lags behind has none, because whoever waits too long goes on without it.
    """

    busy: float = 0.7
    """Share of the time that one replica is meant to compute."""
    wait: float = 0.1
    """Share of a round that sessions may wait for a draft before another replica is worth its while."""
    sessions: float = 256.0
    """Sessions that one replica is meant to have at most, busy or not: `max_sessions` of them find no place on more."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        check(self.sessions > 0, "sessions", "positive", self.sessions)
        check(0 < self.busy <= 1, "busy", "in (0, 1]", self.busy)
        check(0 < self.wait <= 1, "wait", "in (0, 1]", self.wait)
