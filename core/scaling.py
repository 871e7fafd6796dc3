"""How many replicas a load asks for: each deployment by the signal that fits it, as pure functions.

Serve's policies (`deploy.serve.autoscaling`) and the simulated day (`outrider simulate`) call the same. Bounds and
delays are applied after them; what is decided here is free of flapping by itself: a load that stays the same is
answered with a count that stays the same (a test walks loads and counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Final

from core.config import DraftScaling, OrchestratorScaling, TargetScaling

SPARE: Final = 0.2
"""Share of what they are meant to hold that replicas keep free when one of them is let go: load that comes and goes by
less than this changes nothing."""
HELPS: Final = 0.7
"""Share of the wanted utilisation above which sessions may be waiting for each other at a draft, so that one more
replica helps; below it they wait for the draft model itself. A draft is let go only when those that stay would be below
it, or it would be called back at once."""


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """What the replicas of a target hold."""

    num_replicas: int
    """Running now."""
    num_sessions: float
    """Leases, granted and waited for."""
    kv_use: float
    """Share of the KV of all replicas that is in use."""


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """What the replicas of a draft do."""

    num_replicas: int
    """Running now."""
    num_sessions: float
    """Leases, granted and waited for."""
    busy: float
    """Share of the time that a replica computes, on average."""
    wait: float
    """Share of their rounds that sessions wait for a draft."""


Wish = tuple[float, int]
"""When so many replicas were wanted: seconds, and a count."""


def steadied(
    wishes: Sequence[Wish], now_s: float, wanted: int, num_replicas: int, window_s: float
) -> tuple[list[Wish], int]:
    """What to have: what is `wanted`, but of those that there are no fewer than were wanted within the last `window_s`.

    So a wish holds replicas, and is no reason to start any once it has passed. Without a memory, the `num_replicas`
    that there are count as wanted now. Returned after the wishes to remember for the next time.
    """
    kept = [wish for wish in wishes or [(now_s, num_replicas)] if now_s - wish[0] < window_s and wish[1] > wanted]
    kept.append((now_s, wanted))
    return kept, max(wanted, min(num_replicas, max(count for _, count in kept)))


def _whole(amount: float) -> int:
    """Rounded up, but not for the sake of what floating point adds."""
    return ceil(amount - 1e-9)


def _enough(num_replicas: int, work: float, most: float) -> int:
    """Enough replicas for `work`, in replicas; fewer than there are only if each would then have less than `most`."""
    return max(_whole(work), min(num_replicas, floor(work / most) + 1)) if work > 0 else 0


def orchestrators_wanted(num_replicas: int, num_requests: float, scaling: OrchestratorScaling) -> int:
    """Enough for the requests in progress."""
    return _enough(num_replicas, num_requests / scaling.sessions, 1.0 - SPARE)


def targets_wanted(load: TargetLoad, scaling: TargetScaling) -> int:
    """Enough for the sessions and for the KV that they fill: long contexts ask for more than their number does."""
    work = max(load.num_sessions / scaling.sessions, load.num_replicas * load.kv_use / scaling.kv_use)
    return _enough(load.num_replicas, work, 1.0 - SPARE)


def drafts_wanted(load: DraftLoad, scaling: DraftScaling) -> int:
    """Enough to keep utilisation as it is meant to be, one more where sessions wait at busy drafts; none for nobody."""
    if load.num_sessions <= 0:
        return 0
    return max(_by_work(load, scaling), _whole(load.num_sessions / scaling.sessions))


def _by_work(load: DraftLoad, scaling: DraftScaling) -> int:
    now = max(1, load.num_replicas)
    if not load.num_replicas:
        return now
    work = load.busy * load.num_replicas / scaling.busy
    """In replicas that are as busy as they are meant to be."""
    if work > HELPS * now and load.wait > scaling.wait:
        return max(_whole(work), now + 1)
    return _enough(now, work, HELPS) or 1
