"""The number of replicas for a load: pure functions, with one signal for each kind of deployment.

Serve's policies (`deploy.serve.autoscaling`) and the simulated day (`outrider simulate`) call these functions and apply
bounds and delays afterwards. A constant load gives a constant count (a test walks loads and counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Final

from core.config import DraftScaling, OrchestratorScaling, TargetScaling

SPARE_SHARE: Final = 0.2
"""A replica is removed only if the remaining ones would have this share of their capacity free. Small fluctuations of
load then change nothing."""
CROWDED_SHARE: Final = 0.7
"""Above this share of the wanted utilisation, sessions wait for each other at a draft, so another replica helps. Below
it they wait only for the draft model itself. A draft is removed only if the remaining ones stay below this share;
otherwise it would be restarted at once."""


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """The load of a target's replicas."""

    num_replicas: int
    """Replicas running now."""
    num_sessions: float
    """Leases, granted and waiting."""
    kv_use: float
    """Share of the KV of all replicas that is in use, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """The load of a draft's replicas."""

    num_replicas: int
    """Replicas running now."""
    num_sessions: float
    """Leases, granted and waiting."""
    busy: float
    """Share of the time that a replica computes, averaged over replicas, in [0, 1]."""
    wait: float
    """Share of a round that sessions wait for a draft, in [0, 1]."""


Recommendation = tuple[float, int]
"""A time in seconds, and the number of replicas wanted at that time."""


def with_downscale_delay(
    recommendations: Sequence[Recommendation], now_s: float, wanted: int, num_replicas: int, window_s: float
) -> tuple[list[Recommendation], int]:
    """Recommendations to remember, and the number of replicas: `wanted`, or more if more were wanted within `window_s`.

    A past recommendation keeps existing replicas and starts none. Without past recommendations, the existing
    `num_replicas` count as wanted now.
    """
    kept = [
        each for each in recommendations or [(now_s, num_replicas)] if now_s - each[0] < window_s and each[1] > wanted
    ]
    kept.append((now_s, wanted))
    return kept, max(wanted, min(num_replicas, max(count for _, count in kept)))


def _whole(amount: float) -> int:
    """Rounded up, except for floating-point error."""
    return ceil(amount - 1e-9)


def _enough(num_replicas: int, work: float, max_work: float) -> int:
    """Number of replicas for `work` (in replicas). Fewer than now only if each then has less than `max_work`."""
    return max(_whole(work), min(num_replicas, floor(work / max_work) + 1)) if work > 0 else 0


def orchestrators_wanted(num_replicas: int, num_requests: float, scaling: OrchestratorScaling) -> int:
    """Replicas for the requests in progress."""
    return _enough(num_replicas, num_requests / scaling.sessions, 1.0 - SPARE_SHARE)


def targets_wanted(load: TargetLoad, scaling: TargetScaling) -> int:
    """Replicas for the sessions and for their KV, whichever needs more. A few long contexts can fill the KV."""
    work = max(load.num_sessions / scaling.sessions, load.num_replicas * load.kv_use / scaling.kv_use)
    return _enough(load.num_replicas, work, 1.0 - SPARE_SHARE)


def drafts_wanted(load: DraftLoad, scaling: DraftScaling) -> int:
    """Replicas for the wanted utilisation, one more if sessions wait at busy drafts, 0 without sessions."""
    if load.num_sessions <= 0:
        return 0
    return max(_by_work(load, scaling), _whole(load.num_sessions / scaling.sessions))


def _by_work(load: DraftLoad, scaling: DraftScaling) -> int:
    now = max(1, load.num_replicas)
    if not load.num_replicas:
        return now
    work = load.busy * load.num_replicas / scaling.busy
    """Number of replicas at the wanted utilisation."""
    if work > CROWDED_SHARE * now and load.wait > scaling.wait:
        return max(_whole(work), now + 1)
    return _enough(now, work, CROWDED_SHARE) or 1
