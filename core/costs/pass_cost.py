"""Observed durations of passes by number of rows.

Knows seconds, rows and branches; must not know what a pass is for. The cost of passes of one width is the median of the
last few. One late answer then changes nothing, and an engine that slows down is noticed soon.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

FEW_ROWS = 16
"""Up to this many rows, each number of rows has its own cost: engines pad rows to small tiles, so costs rise in
steps."""
NUM_RECENT = 15
"""Number of observations kept of each kind."""
EXTRAPOLATION = 4.0
"""The fitted line continues up to this multiple of the widest observed pass; beyond it, time is proportional to rows.
Optimistic extrapolation is worth 1.03, and this limit 1.03 (`bench ablation`, docs/adr/control)."""
SURE = 3
"""Number of passes of one width before their median is trusted, so that one slow pass does not decide it."""
BRANCH_PASSES = 200
"""Number of passes without branches after which the cost of branches is forgotten, so that branches are tried again.
The cost of branches is worth 1.17 on a target that computes them one by one (docs/LOG.md, 2026-11-22), else nothing."""


class Curve:
    """Duration of a pass in seconds by number of rows: linear between observations, optimistic beyond them.

    The line through the narrowest and the widest pass continues on both sides. The optimism makes the policy try new
    widths, and only tried widths are learned. Beyond `EXTRAPOLATION` times the widest pass, time is proportional to
    rows.
    """

    def __init__(self, rows: Sequence[float], seconds: Sequence[float]) -> None:
        self._rows = tuple(rows)
        self._seconds = tuple(seconds)
        self._known: dict[float, float] = {}
        """Cache: every round asks for the same few widths."""

    def __call__(self, rows: float) -> float:
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._of(rows)
        return known

    def _of(self, rows: float) -> float:
        known, seconds = self._rows, self._seconds
        if rows <= known[0]:
            share = rows / known[0]
            return seconds[0] * share if len(known) == 1 else max(self._line(0, -1, rows), seconds[0] * share)
        if rows < known[-1]:
            left = bisect_right(known, rows) - 1
            return self._line(left, left + 1, rows)
        limit = EXTRAPOLATION * known[-1]
        return self._line(0, -1, min(rows, limit)) * max(rows / limit, 1.0)

    def _line(self, first: int, second: int, rows: float) -> float:
        return self._seconds[first] + self._slope(first, second) * (rows - self._rows[first])

    def _slope(self, first: int, second: int) -> float:
        width = self._rows[second] - self._rows[first]
        return (self._seconds[second] - self._seconds[first]) / width if width else 0.0


def _recent() -> deque[tuple[float, float]]:
    return deque(maxlen=NUM_RECENT)


@dataclass(slots=True)
class _Width:
    """Observed passes with about the same number of rows."""

    straight: deque[tuple[float, float]] = field(default_factory=_recent)
    """(rows, seconds) of passes without branches, or with an unknown number of them."""
    branched: deque[tuple[float, float]] = field(default_factory=_recent)
    """(rows, seconds) of passes with branches."""
    branches: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    """Number of branches of each pass in `branched`."""

    @property
    def usual(self) -> tuple[float, float, int]:
        """Median rows, median seconds and number of passes; only passes without branches count, if there are any."""
        passes = self.straight or self.branched
        rows, seconds = zip(*passes, strict=True)
        return median(rows), median(seconds), len(passes)

    def branch_s(self) -> list[float]:
        """Seconds that one branch added, for each pass with branches."""
        if not self.straight:
            return []
        usual_s = median(seconds for _, seconds in self.straight)
        pairs = zip(self.branched, self.branches, strict=True)
        return [(seconds - usual_s) / branches for (_, seconds), branches in pairs]


class PassCost:
    """Learns the duration of a forward pass by its number of rows (never falling), and the duration of a branch.

    A target that computes the branches of a tree one by one takes longer than for as many rows without branches.
    """

    def __init__(self, prior_s: float) -> None:
        self._prior_s = prior_s
        self._widths = defaultdict[int, _Width](_Width)
        self._num_straight = 0
        """Number of passes since the last one with branches."""

    def __repr__(self) -> str:
        return f"<PassCost {', '.join(f'{rows}: {s * 1e3:.1f} ms' for rows, s in self.points().items())}>"

    def observe(self, rows: float, seconds: float, branches: float = 0.0) -> None:
        """Record that one pass of `rows` rows took `seconds`. Ignores impossible values."""
        if not (rows > 0 and seconds > 0 and math.isfinite(seconds)):
            return
        width = self._widths[_bucket(rows)]
        if branches:
            width.branched.append((rows, seconds))
            width.branches.append(branches)
        else:
            width.straight.append((rows, seconds))
        self._num_straight = 0 if branches else self._num_straight + 1

    def min_s(self, rows: float) -> float:
        """Duration of the fastest recent pass with at least `rows` rows."""
        seen = chain.from_iterable((*width.straight, *width.branched) for width in self._widths.values())
        return min((seconds for num, seconds in seen if num >= rows), default=self._prior_s)

    def curve(self) -> Curve:
        """Return the current estimate for passes without branches."""
        return Curve(*self._fitted())

    @property
    def branch_s(self) -> float:
        """Seconds that a branch adds to a pass."""
        if self._num_straight > BRANCH_PASSES:
            return 0.0
        more = [seconds for bucket, width in self._widths.items() if bucket < FEW_ROWS for seconds in width.branch_s()]
        return max(0.0, median(more)) if more else 0.0

    def points(self) -> dict[int, float]:
        """Durations by rows, at the powers of two in the observed range: few keys, because they become a metric's
        labels."""
        if not self._widths:
            return {}
        known, seconds = self._fitted()
        first, last = (math.log2(max(1.0, rows)) for rows in (known[0], known[-1]))
        curve = Curve(known, seconds)
        return {2**power: curve(2.0**power) for power in range(math.floor(first), math.ceil(last) + 1)}

    def _fitted(self) -> tuple[list[float], list[float]]:
        """Median rows and seconds of each width, made monotone by isotonic regression (pool adjacent violators)."""
        if not self._widths:
            return [1.0, FEW_ROWS], [self._prior_s, self._prior_s]
        widths = sorted(width.usual for width in self._widths.values())
        row_s = widths[0][1] / widths[0][0]
        pools: list[tuple[float, int, int]] = []  # seconds, passes, widths
        for rows, seconds, num in widths:
            # With few passes, the cost is capped at that of the rows one by one. Else the width might never be retried.
            pools.append((seconds if num >= SURE else min(seconds, row_s * rows), num, 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (left, n, k), (right, m, j) = pools[-2:]
                pools[-2:] = [((left * n + right * m) / (n + m), n + m, k + j)]
        return [rows for rows, _, _ in widths], [seconds for seconds, _, num in pools for _ in range(num)]


def _bucket(rows: float) -> int:
    """Map small numbers of rows to themselves, larger ones to groups of a constant ratio."""
    if rows <= FEW_ROWS:
        return round(max(rows, 1.0))
    return FEW_ROWS + round(2.0 * math.log2(rows / FEW_ROWS))
