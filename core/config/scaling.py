"""Settings of autoscaling, by deployment."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import ABOVE_0, SHARE_ABOVE_0, Settings, at_least, check


@dataclass(frozen=True, slots=True)
class Autoscaling(Settings):
    """Bounds of the number of replicas, and how fast it follows the load."""

    max_replicas: int
    """Largest number of replicas, at least 1 and at least `min_replicas`. Raise it as far as the cluster's hardware
    allows."""
    min_replicas: int = 1
    """Smallest number of replicas, at least 0. With 0 the last replica stops when it is idle, and the next request
    waits for one to start. Raise it where no request may wait for a start."""
    upscale_delay_s: float = 10.0
    """Seconds, at least 0, that the load must call for more replicas before they start; from 0 replicas the first one
    starts at once. Raise it where short peaks start replicas that are not needed."""
    downscale_delay_s: float = 600.0
    """Seconds, at least 0, that the load must call for fewer replicas before one stops. Raise it where replicas start
    slowly, lower it to free hardware sooner."""
    window_s: float = 20.0
    """Seconds over which the load is averaged, above 10 because replicas report every ten seconds. Raise it where the
    load fluctuates."""

    def __post_init__(self) -> None:
        self._check(at_least(0), "min_replicas", "upscale_delay_s", "downscale_delay_s")
        self._check(at_least(max(1, self.min_replicas)), "max_replicas")
        check(self.window_s > 10, "window_s", "above 10", self.window_s)


@dataclass(frozen=True, slots=True)
class OrchestratorScaling(Autoscaling):
    """Autoscaling of orchestrators, by requests in progress."""

    sessions: float = 64.0
    """Number of requests in progress that one orchestrator should have, above 0. Lower it where an orchestrator's CPU
    is the bottleneck."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        self._check(ABOVE_0, "sessions")
        check(self.min_replicas >= 1, "min_replicas", "at least 1: orchestrators take the calls", self.min_replicas)


@dataclass(frozen=True, slots=True)
class TargetScaling(Autoscaling):
    """Autoscaling of targets, by sessions or by KV in use, whichever calls for more replicas."""

    sessions: float = 32.0
    """Number of live sessions that one replica should have, waiting ones included, above 0. Lower it where streams are
    too slow, raise it for throughput."""
    kv_use: float = 0.8
    """Share of its KV cache that a replica should use, in (0, 1]. Lower it where sessions are preempted."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        self._check(ABOVE_0, "sessions")
        self._check(SHARE_ABOVE_0, "kv_use")


@dataclass(frozen=True, slots=True)
class DraftScaling(Autoscaling):
    """Autoscaling of drafts, by utilisation and by the time that verification waits for them.

    Queue length is not used as a signal: a slow draft has no queue, because sessions that wait too long go on without
    it.
    """

    busy: float = 0.7
    """Share of the time that a replica should be computing, in (0, 1]. Lower it where verification waits for drafts."""
    wait: float = 0.1
    """Share of a round, in (0, 1], that sessions may spend waiting for a draft; above it another replica starts. Lower
    it where draft hardware is cheap."""
    sessions: float = 256.0
    """Largest number of sessions for each replica, whatever its utilisation, above 0 and at most the draft's
    `max_sessions`. Lower it where a replica's memory does not hold that number of contexts."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        self._check(ABOVE_0, "sessions")
        self._check(SHARE_ABOVE_0, "busy", "wait")
