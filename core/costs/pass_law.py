"""Duration of a forward pass by its number of rows, for named models on named hardware.

The simulator takes pass times from here. `paced_as` slows an engine down to other hardware by the same figures. The
laws of large models are round figures, similar to those of published systems.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PassLaw:
    """Seconds of one forward pass: linear between measured points, proportional to rows beyond the last one."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), in ascending order."""

    def __post_init__(self) -> None:
        if not self.points or list(self.points) != sorted(self.points) or self.points[0][1] < 0:
            raise ValueError("the law of a pass needs points in the order of their rows")

    @classmethod
    def flat(cls, pass_s: float, up_to_rows: int = 64) -> PassLaw:
        """Constant up to `up_to_rows`, proportional beyond: a small model on a small GPU."""
        return cls(((1, pass_s), (up_to_rows, pass_s)))

    @classmethod
    def memory_bound(cls, pass_s: float) -> PassLaw:
        """A large model: 1.05x at 32 guesses, 1.1x at 64, and compute-bound from a few hundred rows on."""
        shares = ((1, 1.0), (9, 1.0), (33, 1.05), (65, 1.1), (257, 1.35), (513, 1.8))
        return cls(tuple((rows, pass_s * share) for rows, share in shares))

    def __call__(self, num_rows: int) -> float:
        rows, seconds = zip(*self.points, strict=True)
        if num_rows >= rows[-1]:
            return float(seconds[-1] * num_rows / rows[-1])
        index = bisect_left(rows, num_rows)
        return float(seconds[0] if index == 0 else _between(self.points[index - 1 : index + 1], num_rows))


def _between(points: Sequence[tuple[int, float]], num_rows: int) -> float:
    (low, low_s), (high, high_s) = points
    return low_s + (high_s - low_s) * (num_rows - low) / (high - low)


PASS_LAWS: Mapping[str, PassLaw] = MappingProxyType(
    {
        "70b": PassLaw.memory_bound(0.025),  # on four big GPUs
        "32b": PassLaw.memory_bound(0.018),  # on two
        "8b": PassLaw.memory_bound(0.005),  # on one
        "1b": PassLaw.flat(0.003),  # on a small GPU
        "0.6b": PassLaw.flat(0.0025),
        "0.5b": PassLaw.flat(0.001),  # on a big GPU
        # In float32 on one core, as measured (docs/log/2026-11.md). Every row costs time.
        "123m": PassLaw(((1, 0.060), (4, 0.067), (6, 0.080), (9, 0.086), (11, 0.094), (22, 0.150))),
        "13m": PassLaw(((1, 0.0085), (4, 0.0095), (8, 0.0112), (16, 0.013), (32, 0.020))),
    }
)
"""Law of each model, on typical hardware for it."""
