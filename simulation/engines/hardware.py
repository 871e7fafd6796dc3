"""Durations: of an engine's passes (`core.costs.pass_law`), and of the way between machines.

Knows laws of time only. All are of the kind that one can measure on one's own hardware in a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from core.costs import PassLaw


@dataclass(frozen=True, slots=True)
class EngineLaw:
    """One engine: the law of its passes, and the most rows of one."""

    pass_s: PassLaw
    max_step_tokens: int = 512
    prefill_chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class HopLaw:
    """The wire's share of a call, there and back."""

    round_trip_s: float
    jitter: float = 0.0
    """Mean of the exponential delay that comes on top, as a share of the round trip."""

    def one_way_s(self, random: Random) -> float:
        extra = self.jitter * random.expovariate(1.0) if self.jitter else 0.0
        return self.round_trip_s / 2.0 * (1.0 + extra)
