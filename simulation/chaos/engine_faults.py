"""The faults of engines in a chaotic run: their kinds and times.

Knows fleets; must not know messages or sessions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from simulation.chaos.faults import EventLog
from simulation.cluster import Cluster, Fleet


class EngineFault(StrEnum):
    """Temporary faults of an engine."""

    DEAD = "dead"
    FROZEN = "frozen"
    SLOW = "slow"
    SWAPPED = "swapped"
    """Another engine takes its place at once, as in a hot swap."""
    SCALED = "scaled to zero"
    """All engines of its fleet are gone for a while."""


BREAKDOWNS = (EngineFault.DEAD, EngineFault.FROZEN, EngineFault.SLOW)


@dataclass(frozen=True, slots=True)
class TimedFault:
    """One temporary fault of one engine."""

    at_s: float
    lasts_s: float
    kind: str
    """Kind of the engine's fleet: target, draft, or draft and a number."""
    index: int
    fault: EngineFault


async def inject(timed_fault: TimedFault, cluster: Cluster, events: EventLog) -> None:
    """Start the fault at its time, and end it."""
    fleet: Fleet[Any] = next(fleet for fleet in cluster.fleets if fleet.kind == timed_fault.kind)
    await asyncio.sleep(timed_fault.at_s)
    replica = fleet.replicas[timed_fault.index]
    events.note(f"{timed_fault.kind} engine {timed_fault.fault}", f"{replica!r} for {timed_fault.lasts_s:.3f} s")
    engine = replica.engine
    gone = {EngineFault.DEAD: [replica], EngineFault.SCALED: fleet.replicas}.get(timed_fault.fault, [])
    for each in gone:
        each.engine.kill()
    match timed_fault.fault:
        case EngineFault.FROZEN:
            engine.freeze()
        case EngineFault.SLOW:
            engine.slowness = 20.0
        case EngineFault.SWAPPED:
            replica.restart()
    await asyncio.sleep(timed_fault.lasts_s)
    for each in gone:
        each.restart()
    engine.thaw()
    engine.slowness = 1.0
