"""Observed durations of passes by number of rows, and estimated durations of rounds.

Knows seconds, rows and branches; must not know what a pass is for. The cost of passes of one width is the median of the
last few. One late answer then changes nothing, and an engine that slows down is noticed soon.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import median

import numpy as np

from core.records import Timing
from core.speculation import Floats

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
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Possible numbers of rows of one session in a pass of the draft. Worth 1.06 against always 8 (`bench ablation`,
docs/adr/control)."""
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


class EngineCost:
    """Observed costs of one kind of engine: its passes, and the round trip to it."""

    def __init__(self, prior_s: float) -> None:
        self.passes = PassCost(prior_s)
        self._wires: deque[float] = deque([0.001], maxlen=NUM_RECENT)
        self._last: Timing | None = None

    def __repr__(self) -> str:
        return f"<EngineCost {self.passes}, wire {self.wire_s * 1e3:.1f} ms>"

    @property
    def wire_s(self) -> float:
        """Seconds of a round trip on the wire and in the batcher.

        The lower quartile of recent round trips, since many of them may have waited behind a prompt.
        """
        return sorted(self._wires)[len(self._wires) // 4]

    def observe(self, timing: Timing, elapsed_s: float, branches: float = 0.0, *, is_call: bool = True) -> None:
        """Record one answered call; or, if not `is_call`, the engine's work since its last answer.

        `branches` is the number of branches in its passes, 0 if other sessions shared the passes. Sessions that share a
        pass report the same timing, which is counted once. A timing that claims more than `elapsed_s` plus one wire
        time is ignored; the wire time allows for a late previous answer. The head's time is none of the passes': it is
        spent for any number of guesses, and would be taken for the price of the first.
        """
        within_s, passes_s = timing.waited_s + timing.computed_s, timing.computed_s - timing.guessing_s
        if timing.num_passes < 1 or min(timing.waited_s, passes_s) < 0 or within_s > elapsed_s + self.wire_s:
            return
        if is_call:
            self._wires.append(max(0.0, elapsed_s - within_s))
        if self._last is None or not _is_same(timing, self._last):
            self.passes.observe(timing.num_rows / timing.num_passes, passes_s / timing.num_passes, branches)
        self._last = timing


def _is_same(one: Timing, other: Timing) -> bool:
    """Whether two answers report the same passes."""
    is_same_work = (one.num_rows, one.num_passes) == (other.num_rows, other.num_passes)
    return is_same_work and math.isclose(one.computed_s, other.computed_s, rel_tol=1e-9)


@dataclass(frozen=True)
class CostModel:
    """Estimated durations of passes and rounds, at one moment."""

    verify_pass_s: Curve
    draft_pass_s: Curve
    verify_wire_s: float
    draft_wire_s: float
    num_verifying: float = 1.0
    """Number of sessions that share a pass of the target."""
    num_drafting: float = 1.0
    """Number of sessions that share a pass of the draft."""
    branch_s: float = 0.0
    """Seconds that a branch adds to a pass of the target."""

    @property
    def is_shared(self) -> bool:
        """Whether several sessions share the passes of the target."""
        return self.num_verifying >= 2.0

    def verify_s(self, nodes: float, branches: float = 0.0) -> float:
        """Seconds of a round trip to the target with a block of `nodes` nodes, if all sessions send such a block."""
        pass_s = self.verify_pass_s(self.num_verifying * (nodes + 1.0)) + self.num_verifying * branches * self.branch_s
        return pass_s + self.verify_wire_s

    def verify_times(self, num_nodes: int) -> Floats:
        """Return `verify_s` of blocks of 0 to `num_nodes` nodes without branches.  # [num_nodes + 1]"""
        known = self._verify_times
        for nodes in range(len(known), num_nodes + 1):
            known.append(self.verify_s(nodes))
        return np.array(known[: num_nodes + 1])

    @cached_property
    def _verify_times(self) -> list[float]:
        return []

    @cached_property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding."""
        return 1.0 / self.verify_s(0)

    def draft_s(self, rows: float, num_passes: int) -> float:
        """Seconds of a round trip to the draft for `num_passes` passes with `rows` rows of each session."""
        return num_passes * self.draft_pass_s(self.num_drafting * rows) + self.draft_wire_s

    def turn_s(self, nodes: float, rows: float, num_passes: int) -> float:
        """Seconds of a round without pipelining: `num_passes` passes of the draft, then a block of `nodes` nodes.

        A pass of the draft has `rows` rows of each session.

        Sessions that share passes split into groups, which are verified one after another. The estimate uses as many
        groups as it takes to hide the drafting of one group behind the verification of the others.
        """
        if not self.is_shared:
            return self.verify_s(nodes) + self.draft_s(rows, num_passes)
        groups, most = 1, int(self.num_verifying)
        hidden_s, drafting_s = 0.0, math.inf
        while hidden_s < drafting_s and groups < most:
            groups += 1
            group_s = self.verify_pass_s(self.num_verifying / groups * (nodes + 1.0)) + self.verify_wire_s
            drafting_s = num_passes * self.draft_pass_s(self.num_drafting / groups * rows) + self.draft_wire_s
            hidden_s = (groups - 1) * group_s
        return group_s + max(hidden_s, drafting_s)

    @cached_property
    def rows_worth(self) -> int:
        """Rows per session and pass of the draft with the most yield per second.

        The r-th likeliest row is assumed to be needed 1/r as often as the first.
        """
        return max(WIDTHS, key=lambda rows: math.log1p(2.0 * rows) / self.draft_pass_s(self.num_drafting * rows))
