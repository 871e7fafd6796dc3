"""A day of load, and the number of replicas of each model: the real autoscaling rules on simulated load.

The number of sessions follows the hour, with noise and sudden crowds. Each session fills KV, uses its draft, and waits
if drafts are busy. `core.scaling` recommends replicas, and they start as in Serve: by a windowed average, within
bounds, after a delay and a loading time. No tokens are computed, since rounds take milliseconds and scaling minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import exp, pi, sin
from random import Random
from typing import Final

from core import scaling
from core.config import Autoscaling, DraftScaling, OrchestratorScaling, TargetScaling
from core.scaling import DraftLoad, TargetLoad

TICK_S: Final = 10.0
DAY_S: Final = 86_400.0
REVERSAL_S: Final = 600.0
"""Two changes in opposite directions within this time, in seconds, count as a flap."""
ROLES: Final = ("orchestrator", "draft", "target")
LOADING_S: Final = {"orchestrator": 15.0, "draft": 45.0, "target": 180.0}
"""Seconds until a new replica serves: time to get a node, an image and weights."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Autoscaling settings of the three deployments."""

    orchestrator: OrchestratorScaling
    draft: DraftScaling
    target: TargetScaling

    def of(self, role: str) -> Autoscaling:
        settings: Autoscaling = getattr(self, role)
        return settings


@dataclass(frozen=True, slots=True)
class Demand:
    """Sessions over the day, and the load of each."""

    peak_sessions: float
    """Number of sessions at the busiest hour."""
    night_share: float = 0.1
    """Share of the peak at the quietest hour; with 0 there are hours without a session."""
    noise: float = 0.1
    """Standard deviation of the load, as a share of its expected value; deviations last for minutes."""
    num_crowds: int = 3
    """Number of crowds per day. A crowd adds half the peak within a minute and stays for ten minutes."""
    session_kv: float = 0.02
    """Share of one target's KV that a session fills."""
    session_work: float = 0.03
    """Share of one draft's time that a session takes."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Sessions and replicas of a cluster at one moment."""

    at_s: float
    num_sessions: float
    num_replicas: Mapping[str, int]
    """Number of replicas that serve, by role."""
    num_short: float = 0.0
    """Number of sessions beyond what the targets can hold; they are refused or wait."""


@dataclass(frozen=True, slots=True)
class Day:
    """The moments of one day."""

    moments: Sequence[Moment]

    def counts(self, role: str) -> list[int]:
        return [moment.num_replicas[role] for moment in self.moments]

    def replica_hours(self, role: str) -> float:
        return sum(self.counts(role)) * TICK_S / 3600

    def num_changes(self, role: str) -> int:
        return len(self._changes(role))

    def num_flaps(self, role: str) -> int:
        """Number of changes that reverse the previous one within REVERSAL_S."""
        changes = self._changes(role)
        return sum(
            (one > 0) != (other > 0) and later_s - earlier_s < REVERSAL_S
            for (earlier_s, one), (later_s, other) in pairwise(changes)
        )

    def short_share(self) -> float:
        """Share of all session time spent without a lease."""
        total = sum(moment.num_sessions for moment in self.moments)
        return sum(moment.num_short for moment in self.moments) / total if total else 0.0

    def _changes(self, role: str) -> list[tuple[float, int]]:
        counts = self.counts(role)
        return [
            (moment.at_s, after - before)
            for moment, before, after in zip(self.moments[1:], counts, counts[1:], strict=False)
            if after != before
        ]


def simulate_day(demand: Demand, settings: Scaling, seed: int = 0) -> Day:
    """Simulate one day from midnight, in ticks of TICK_S."""
    fleets = {role: _Fleet(settings.of(role), LOADING_S[role]) for role in ROLES}
    wanted: Mapping[str, Callable[[float], int]] = {
        "orchestrator": lambda sessions: scaling.orchestrators_wanted(
            fleets["orchestrator"].num_running, sessions, settings.orchestrator
        ),
        "draft": lambda sessions: scaling.drafts_wanted(
            _draft_load(fleets["draft"].num_running, sessions, demand), settings.draft
        ),
        "target": lambda sessions: scaling.targets_wanted(
            _target_load(fleets["target"].num_running, sessions, demand), settings.target
        ),
    }
    moments = []
    sessions_by_time = _sessions_by_time(demand, Random(seed))  # noqa: S311  not for secrets
    for tick, sessions in zip(range(round(DAY_S / TICK_S)), sessions_by_time, strict=False):
        at_s = tick * TICK_S
        for role, fleet in fleets.items():
            fleet.step(at_s, sessions, wanted[role])
        capacity = fleets["target"].num_running / demand.session_kv
        counts = {role: fleet.num_running for role, fleet in fleets.items()}
        moments.append(Moment(at_s, sessions, counts, max(0.0, sessions - capacity)))
    return Day(moments)


def _sessions_by_time(demand: Demand, random: Random) -> Iterator[float]:
    """Number of sessions, tick by tick."""
    crowds_s = [random.uniform(0, DAY_S) for _ in range(demand.num_crowds)]
    keep, drift = exp(-TICK_S / 300.0), 0.0
    for tick in count():
        at_s = tick * TICK_S
        drift = keep * drift + random.gauss(0, demand.noise * (1 - keep**2) ** 0.5)
        by_hour = 0.5 - 0.5 * sin(2 * pi * (at_s / DAY_S + 0.25))  # 0 at midnight, 1 at noon
        base = demand.night_share + (1 - demand.night_share) * by_hour
        crowd = sum(0.5 for began_s in crowds_s if 0 <= at_s - began_s < 600)
        yield float(round(demand.peak_sessions * max(0.0, base * (1 + drift) + crowd)))


@dataclass(slots=True)
class _Fleet:
    """Replicas of one deployment, scaled as Serve does: from a windowed average, bounded, up after a delay."""

    settings: Autoscaling
    loading_s: float
    num_running: int = field(init=False)
    _ready_s: list[float] = field(init=False, default_factory=list)
    """Times at which loading replicas begin to serve."""
    _seen: deque[float] = field(init=False, default_factory=deque)
    _recommendations: list[scaling.Recommendation] = field(init=False, default_factory=list)
    _more_since_s: float | None = field(init=False, default=None)
    _started_s: float | None = field(init=False, default=None)
    """When replicas were last started, in seconds."""

    def __post_init__(self) -> None:
        self.num_running = self.settings.min_replicas
        self._seen = deque(maxlen=max(1, round(self.settings.window_s / TICK_S)))

    def step(self, now_s: float, sessions: float, wanted: Callable[[float], int]) -> None:
        self.num_running += sum(ready_s <= now_s for ready_s in self._ready_s)
        self._ready_s = [ready_s for ready_s in self._ready_s if ready_s > now_s]
        self._seen.append(sessions)
        self._decide(now_s, wanted(sum(self._seen) / len(self._seen)))

    def _decide(self, now_s: float, wanted: int) -> None:
        settings, now = self.settings, self.num_running + len(self._ready_s)
        if now == 0 and wanted > 0:  # Serve starts the first replica without asking the policy
            self._resize(now_s, 1)
            return
        recommendations = list(self._recommendations)
        if self._started_s is not None and now_s - self._started_s < settings.downscale_delay_s:
            recommendations.append((self._started_s, now))
        self._recommendations, wanted = scaling.with_downscale_delay(
            recommendations, now_s, wanted, now, settings.downscale_delay_s
        )
        wanted = min(settings.max_replicas, max(settings.min_replicas, wanted))
        if wanted <= now:
            self._more_since_s = None
        elif self._more_since_s is None:
            self._more_since_s = now_s
        is_time = self._more_since_s is None or now_s - self._more_since_s >= settings.upscale_delay_s
        if wanted < now or is_time:
            self._resize(now_s, wanted)

    def _resize(self, now_s: float, num_replicas: int) -> None:
        """Start or remove replicas; those still loading are removed first."""
        missing = num_replicas - self.num_running - len(self._ready_s)
        if missing > 0:
            self._started_s = now_s
        self._ready_s += [now_s + self.loading_s] * missing
        while missing < 0 and self._ready_s:
            self._ready_s.pop()
            missing += 1
        self.num_running += min(0, missing)


def _target_load(num_replicas: int, sessions: float, demand: Demand) -> TargetLoad:
    kv = sessions * demand.session_kv
    return TargetLoad(num_replicas, sessions, min(1.0, kv / num_replicas) if num_replicas else 0.0)


def _draft_load(num_replicas: int, sessions: float, demand: Demand) -> DraftLoad:
    """Load of drafts. The wait, a share of a round, grows with utilisation as in a queue."""
    busy = min(1.0, sessions * demand.session_work / num_replicas) if num_replicas else 0.0
    wait = min(1.0, 0.05 * busy / max(0.05, 1.0 - busy))
    return DraftLoad(num_replicas, sessions, busy, wait)
