"""What a pass costs, by its rows, as observed; and what the wire adds.

Knows seconds and rows; must not know what the rows are for. A cost is a profile over rows, learned slowly, times a
pace, learned within a few passes: so an engine that slows down is noticed at every number of rows, also at those that
are not in use, and one late answer changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from core.curve import Curve
from core.records import Timing

FEW_ROWS = 16
"""Up to here each number of rows has a cost of its own."""
YOUNG = 5.0
"""Observations at one number of rows until they are averaged."""
MAX_WEIGHT = 50.0
FIT_EVERY = 8
"""Observations after which a profile that has settled is fitted anew: it moves slowly, and that takes a while."""
OUTLIER = 1.25
"""Times the mean, or a part of it, that one observation counts for at most; what is more than noise is the pace's."""
NUM_RECENT = 5
"""The pace is the median of so many: two outliers in a row change nothing, three are a change."""
MEAN_PACES = 16.0
"""Passes over which its mean goes."""
PRIOR_ROWS = 16.0
"""Rows at which a pass is thought to cost what it costs with one, before any was seen."""
BRANCH_WINDOW = 200.0
"""Passes that tell what a branch costs."""
SURE = 3.0
"""Standard errors that it costs less than they say."""
MAX_BRANCHES = 0.5
"""Share of a pass that its branches have at most: else what rows take could come out as nothing."""
MIN_BRANCH = 0.01
"""Share of a narrow pass below which a branch costs nothing."""
NUM_WIRES = 9
"""Calls of which the median tells what the wire takes."""
PRIOR_WIRE_S = 0.001
HOP_CALLS = 100
NUM_HOPS = 20
"""Of so many times `HOP_CALLS` calls the quickest tells what the wire takes when nothing is waited for."""


def _bucket(rows: float) -> int:
    """Each number of rows by itself while they are few, for there passes come in steps; from there on by ratio."""
    if rows <= FEW_ROWS:
        return round(max(rows, 1.0))
    return FEW_ROWS + round(2.0 * math.log2(rows / FEW_ROWS))


def _near(value: float, usual: float) -> float:
    """`value`, as far as one observation counts."""
    return min(max(value, usual / OUTLIER), usual * OUTLIER)


@dataclass(slots=True)
class _Knot:
    """What passes of about so many rows cost: the median of the first few, so that none rules; then a slow mean."""

    rows: float
    seconds: float
    branches: float = 0.0
    weight: float = 1.0
    young: list[float] = field(default_factory=list)

    def see(self, rows: float, seconds: float, branches: float) -> None:
        self.weight = min(self.weight + 1.0, MAX_WEIGHT)
        self.rows += (rows - self.rows) / self.weight
        self.branches += (branches - self.branches) / self.weight
        if self.weight <= YOUNG:
            self.young.append(seconds)
            self.seconds = median(self.young)
        else:
            self.seconds += (_near(seconds, self.seconds) - self.seconds) / self.weight


@dataclass(slots=True)
class _BranchCost:
    """What a branch adds to a pass: a regression over passes of equal rows and unlike branches, forgetting."""

    likeliest: float = 0.0
    """Seconds, by least squares; held when there are no branches any more, for so long have passes had them."""
    num: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def see(self, branches: float, seconds: float) -> None:
        """More branches than usual, and more seconds than usual."""
        keep = 1.0 - 1.0 / BRANCH_WINDOW
        self.num = self.num * keep + 1.0
        self.xx = self.xx * keep + branches * branches
        self.xy = self.xy * keep + branches * seconds
        self.yy = self.yy * keep + seconds * seconds
        if self.is_known:
            self.likeliest = max(0.0, self.xy / self.xx)

    @property
    def is_known(self) -> bool:
        """Whether there were enough of them, lately."""
        return self.num >= YOUNG and self.xx >= 1.0

    @property
    def surely(self) -> float:
        """Seconds that it takes at least: where branches cost nothing, noise must not say otherwise."""
        if not self.is_known:
            return 0.0
        unexplained = max(self.yy - self.xy * self.xy / self.xx, 0.0) / (self.num - 2.0)
        return max(0.0, self.likeliest - SURE * math.sqrt(unexplained / self.xx))


class PassCost:
    """Learns seconds of one forward pass as a function of its rows: a profile that never falls, times a pace.

    Where a tree's branches are computed one by one each adds to that, however many rows there are: learned apart.
    """

    def __init__(self, prior_s: float) -> None:
        self._prior_s = prior_s
        self._knots: dict[int, _Knot] = {}
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._profile = Curve(*self._fitted())
        self._num_unfitted = 0
        self._branch = _BranchCost()
        self._fitted_branch_s = 0.0
        self.pace = 1.0
        self._mean_pace = 1.0

    def __repr__(self) -> str:
        return f"<PassCost {', '.join(f'{rows:.0f}: {s * 1e3:.1f} ms' for rows, s in self.points().items())}>"

    def see(self, rows: float, seconds: float, branches: float | None = None) -> None:
        """One pass of `rows` rows took `seconds`; `branches` is None where nobody knows how many there were."""
        if not (rows > 0 and seconds > 0 and math.isfinite(seconds)):
            return
        knot = self._knots.get(_bucket(rows))
        self._num_unfitted += 1
        if knot is None:
            at_pace = seconds / self.pace
            self._knots[_bucket(rows)] = _Knot(rows, at_pace, branches or 0.0, young=[at_pace])
            self._fit()
        else:
            usual = knot.branches if branches is None else branches
            self._take_pace(seconds / (self._profile.seen(rows) + self._fitted_branch_s * usual))
            if branches is not None and rows < FEW_ROWS and knot.weight >= YOUNG:  # wider knots hold unlike rows
                at_pace = _near(seconds / self._mean_pace, knot.seconds)
                self._branch.see(branches - knot.branches, at_pace - knot.seconds)
            knot.see(rows, seconds / self.pace, usual)
            if self._num_unfitted >= FIT_EVERY or knot.weight <= YOUNG:
                self._fit()

    def _take_pace(self, ratio: float) -> None:
        """A pass took so many times what its rows and branches say.

        Branches are judged by the mean: where they come in turn, the median of a few goes up and down with them.
        """
        self._recent.append(ratio)
        self.pace = median(self._recent)
        self._mean_pace += (_near(ratio, self._mean_pace) - self._mean_pace) / MEAN_PACES
        self._mean_pace = _near(self._mean_pace, self.pace)

    def _fit(self) -> None:
        self._num_unfitted = 0
        most = (MAX_BRANCHES * knot.seconds / knot.branches for knot in self._knots.values() if knot.branches > 0)
        self._fitted_branch_s = min(self._branch.likeliest, *most, math.inf)
        self._profile = Curve(*self._fitted())

    def __call__(self, rows: float) -> float:
        """Expected seconds of a pass of `rows` rows at the present pace."""
        return self.pace * self._profile(rows)

    def curve(self) -> Curve:
        """The present belief, for keeps; of passes without branches."""
        return self._profile.times(self.pace)

    @property
    def branch_s(self) -> float:
        """What a branch adds at the present pace, as far as that is sure; 0 where it is next to nothing."""
        surely = min(self._branch.surely, self._fitted_branch_s)
        return self.pace * surely if surely > MIN_BRANCH * self._profile(1.0) else 0.0

    def points(self) -> dict[int, float]:
        """At the powers of two over what was observed: few, and always the same: they become a metric's labels."""
        knots = self._sorted()
        if not knots:
            return {}
        first, last = (math.log2(max(1.0, knot.rows)) for knot in (knots[0], knots[-1]))
        return {2**power: self(2.0**power) for power in range(math.floor(first), math.ceil(last) + 1)}

    def _sorted(self) -> list[_Knot]:
        return sorted(self._knots.values(), key=lambda knot: knot.rows)

    def _fitted(self) -> tuple[list[float], list[float]]:
        """The knots without branches, pooled where they fall: isotonic regression by pool-adjacent-violators."""
        if not self._knots:
            return [1.0, PRIOR_ROWS], [self._prior_s, self._prior_s]
        branch_s = self._fitted_branch_s
        pools: list[list[_Knot]] = []
        for knot in self._sorted():
            pools.append([knot])
            while len(pools) > 1 and _mean(pools[-2], branch_s) > _mean(pools[-1], branch_s):
                pools[-2:] = [[*pools[-2], *pools[-1]]]
        seconds = [_mean(pool, branch_s) for pool in pools for _ in pool]
        return [knot.rows for pool in pools for knot in pool], seconds


def _mean(pool: list[_Knot], branch_s: float) -> float:
    straight_s = sum((knot.seconds - branch_s * knot.branches) * knot.weight for knot in pool)
    return straight_s / sum(knot.weight for knot in pool)


class EngineCost:
    """One kind of engine: its passes, and the wire to it."""

    def __init__(self, prior_s: float) -> None:
        self.passes = PassCost(prior_s)
        self._wires: deque[float] = deque(maxlen=NUM_WIRES)
        self._hops: deque[float] = deque(maxlen=NUM_HOPS)
        self._num_calls = 0
        self._last: Timing | None = None

    def __repr__(self) -> str:
        return f"<EngineCost {self.passes}, wire {self.wire_s * 1e3:.1f} ms>"

    @property
    def wire_s(self) -> float:
        """Of a call and its answer, and of gathering the call with others: the median of the last few."""
        return median(self._wires) if self._wires else PRIOR_WIRE_S

    @property
    def hop_s(self) -> float:
        """Of a call and its answer alone: where calls wait for one another the others contain that wait."""
        return min(self._hops, default=PRIOR_WIRE_S)

    def see(self, timing: Timing, elapsed_s: float, branches: float | None = None, *, is_call: bool = True) -> None:
        """One answered call, or with `is_call` false what the engine did without one, since its answer before.

        `branches` are those of its passes, None where others had part in them. Those who shared its passes tell the
        same, and it counts once. An engine that claims to have taken longer than `elapsed_s` is not believed; an answer
        before that took its way longer than this one makes it look so.
        """
        within_s = timing.waited_s + timing.computed_s
        if timing.num_passes < 1 or min(timing.waited_s, timing.computed_s) < 0:
            return
        if within_s > 1.05 * elapsed_s + (0.001 if is_call else self.wire_s):
            return
        if is_call:
            self._see_wire(max(0.0, elapsed_s - within_s))
        if self._last is None or not _is_same(timing, self._last):
            self.passes.see(timing.num_rows / timing.num_passes, timing.computed_s / timing.num_passes, branches)
        self._last = timing

    def _see_wire(self, wire_s: float) -> None:
        self._wires.append(wire_s)
        if self._num_calls % HOP_CALLS == 0:
            self._hops.append(wire_s)
        self._hops[-1] = min(self._hops[-1], wire_s)
        self._num_calls += 1

    def see_late(self, rows: float, num_passes: int, elapsed_s: float) -> None:
        """No answer after `elapsed_s`: each of its passes takes at least its share of that."""
        rows = max(rows, 1.0)
        self.passes.see(rows, max(elapsed_s / max(num_passes, 1), self.passes(rows)))


def _is_same(one: Timing, other: Timing) -> bool:
    """Whether two answers tell of the same passes."""
    is_same_work = (one.num_rows, one.num_passes) == (other.num_rows, other.num_passes)
    return is_same_work and math.isclose(one.computed_s, other.computed_s, rel_tol=1e-9)
