"""Settings of autoscaling, by deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Bounds of the number of replicas, and how soon it follows the load."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    max_replicas: int
    """Most replicas, at least 1 and at least `min_replicas`. Raise it as far as the cluster has hardware."""
    min_replicas: int = 1
    """Fewest replicas, at least 0. With 0 the last replica goes when nothing is asked of it, and the next request waits
    for one to start."""
    upscale_delay_s: float = 10.0
    """Seconds, at least 0, for which more replicas must be wanted before they start; the first one, from none, starts
    at once. Raise it where short peaks start replicas in vain."""
    downscale_delay_s: float = 600.0
    """Seconds, at least 0, for which fewer replicas must be wanted before one stops. Raise it where replicas start
    slowly."""
    window_s: float = 20.0
    """Seconds, above 10, over which load is averaged: replicas report every ten seconds. Raise it where the load
    fluctuates."""

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
    """Requests in progress for each orchestrator, above 0. Lower it where an orchestrator's CPU is the bottleneck."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        check(self.sessions > 0, "sessions", "positive", self.sessions)
        check(self.min_replicas >= 1, "min_replicas", "at least 1: orchestrators take the calls", self.min_replicas)


@dataclass(frozen=True, slots=True)
class TargetScaling(Autoscaling):
    """Targets follow their sessions and the KV in use, whichever asks for more replicas."""

    sessions: float = 32.0
    """Live sessions for each replica, waiting ones included, above 0. Lower it where streams are too slow, raise it for
    throughput."""
    kv_use: float = 0.8
    """Share of a replica's KV that is meant to be in use, in (0, 1]. Lower it where sessions are preempted."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        check(self.sessions > 0, "sessions", "positive", self.sessions)
        check(0 < self.kv_use <= 1, "kv_use", "in (0, 1]", self.kv_use)


@dataclass(frozen=True, slots=True)
class DraftScaling(Autoscaling):
    """Drafts follow their own utilisation and the time that verification waits for them.

    The length of a queue is no
    signal: a slow draft has no queue, because sessions that wait too long go on without it.
    """

    busy: float = 0.7
    """Share of the time that a replica is meant to compute, in (0, 1]. Lower it where verification waits for drafts."""
    wait: float = 0.1
    """Share of a round, in (0, 1], that sessions may wait for a draft before another replica is started. Lower it where
    draft hardware is cheap."""
    sessions: float = 256.0
    """Most sessions for each replica, busy or not, above 0; at most the draft's `max_sessions`, beyond which a replica
    grants no leases."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        check(self.sessions > 0, "sessions", "positive", self.sessions)
        check(0 < self.busy <= 1, "busy", "in (0, 1]", self.busy)
        check(0 < self.wait <= 1, "wait", "in (0, 1]", self.wait)
