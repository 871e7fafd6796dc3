"""How long things take: forward passes by their rows, and the way between machines.

Knows laws of time only. All are of the kind that one can measure on one's own hardware in a minute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class PassLaw:
    """Seconds of one forward pass: linear between measured points, in proportion to rows beyond the last."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), rising."""

    def __post_init__(self) -> None:
        if not self.points or list(self.points) != sorted(self.points) or self.points[0][1] < 0:
            raise ValueError("the law of a pass needs points in the order of their rows")

    @classmethod
    def flat(cls, pass_s: float, up_to_rows: int) -> PassLaw:
        """The same time up to so many rows, and in proportion beyond."""
        return cls(((1, pass_s), (up_to_rows, pass_s)))

    def __call__(self, num_rows: int) -> float:
        rows, seconds = zip(*self.points, strict=True)
        if num_rows >= rows[-1]:
            return float(seconds[-1] * num_rows / rows[-1])
        index = bisect_left(rows, num_rows)
        return float(seconds[0] if index == 0 else _between(self.points[index - 1 : index + 1], num_rows))


def _between(points: Sequence[tuple[int, float]], num_rows: int) -> float:
    (low, low_s), (high, high_s) = points
    return low_s + (high_s - low_s) * (num_rows - low) / (high - low)


@dataclass(frozen=True, slots=True)
class EngineLaw:
    """One engine: its passes, and how many rows it takes into one."""

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
