"""What a pass costs, by its rows, as observed; and what the wire adds.

Knows seconds and rows; must not know what the rows are for. What passes of one width cost is the mean of the last
few of them, but for outliers: so one late answer changes nothing, and an engine that slows down is noticed soon.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from core.costs.curve import Curve
from core.records import Timing

FEW_ROWS = 16
"""Up to here each number of rows has a cost of its own."""
YOUNG = 5
"""Passes of one width until they are known well enough to be fitted only now and then."""
NUM_RECENT = 15
"""Passes of one width that are remembered."""
FIT_EVERY = 8
"""Observations after which a profile is fitted anew: it moves slowly, and that takes a while."""
OUTLIER = 1.25
"""Times the median, or a part of it, that one observation counts for at most."""
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


def _bucket(rows: float) -> int:
    """Each number of rows by itself while they are few, for there passes come in steps; from there on by ratio."""
    if rows <= FEW_ROWS:
        return round(max(rows, 1.0))
    return FEW_ROWS + round(2.0 * math.log2(rows / FEW_ROWS))


def _median(values: Collection[float]) -> float:
    """As `statistics.median`, which takes several times as long over a few values."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _near(value: float, usual: float) -> float:
    """`value`, as far as one observation counts."""
    return min(max(value, usual / OUTLIER), usual * OUTLIER)


@dataclass(slots=True)
class _Knot:
    """What passes of about so many rows cost."""

    rows: float = 0.0
    seconds: float = 0.0
    branches: float = 0.0
    num_seen: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def see(self, rows: float, seconds: float, branches: float) -> None:
        self.num_seen += 1
        if self.num_seen == YOUNG:  # the first pass of a width is often slow: something was compiled, or allocated
            self.recent.popleft()
        self.recent.append(seconds)
        usual = _median(self.recent)
        least, most = usual / OUTLIER, usual * OUTLIER
        self.seconds = math.fsum([min(max(each, least), most) for each in self.recent]) / len(self.recent)
        self.rows += (rows - self.rows) / self.weight
        self.branches += (branches - self.branches) / self.weight

    @property
    def weight(self) -> int:
        """Passes that it is the mean of."""
        return len(self.recent)


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
    """Learns seconds of one forward pass as a function of its rows: a profile that never falls.

    Where a tree's branches are computed one by one each adds to that, however many rows there are: learned apart.
    """

    def __init__(self, prior_s: float) -> None:
        self._prior_s = prior_s
        self._knots: dict[int, _Knot] = {}
        self._profile = Curve(*self._fitted())
        self._num_unfitted = 0
        self._branch = _BranchCost()
        self._fitted_branch_s = 0.0

    def __repr__(self) -> str:
        return f"<PassCost {', '.join(f'{rows:.0f}: {s * 1e3:.1f} ms' for rows, s in self.points().items())}>"

    def see(self, rows: float, seconds: float, branches: float | None = None) -> None:
        """One pass of `rows` rows took `seconds`; `branches` is None where nobody knows how many there were."""
        if not (rows > 0 and seconds > 0 and math.isfinite(seconds)):
            return
        knot = self._knots.setdefault(_bucket(rows), _Knot())
        if branches is not None and rows < FEW_ROWS and knot.weight >= YOUNG:  # wider knots hold unlike rows
            self._branch.see(branches - knot.branches, _near(seconds, knot.seconds) - knot.seconds)
        knot.see(rows, seconds, knot.branches if branches is None else branches)
        self._num_unfitted += 1
        if self._num_unfitted >= FIT_EVERY or knot.weight <= YOUNG:
            self._fit()

    def _fit(self) -> None:
        self._num_unfitted = 0
        most = (MAX_BRANCHES * knot.seconds / knot.branches for knot in self._knots.values() if knot.branches > 0)
        self._fitted_branch_s = min(self._branch.likeliest, *most, math.inf)
        self._profile = Curve(*self._fitted())

    def __call__(self, rows: float) -> float:
        """Expected seconds of a pass of `rows` rows."""
        return self._profile(rows)

    def curve(self) -> Curve:
        """The present belief, for keeps; of passes without branches."""
        return self._profile

    @property
    def branch_s(self) -> float:
        """What a branch adds, as far as that is sure; 0 where it is next to nothing."""
        surely = min(self._branch.surely, self._fitted_branch_s)
        return surely if surely > MIN_BRANCH * self._profile(1.0) else 0.0

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
    straight_s, num = 0.0, 0
    for knot in pool:
        straight_s += (knot.seconds - branch_s * knot.branches) * knot.weight
        num += knot.weight
    return straight_s / num


class EngineCost:
    """One kind of engine: its passes, and the wire to it."""

    def __init__(self, prior_s: float) -> None:
        self.passes = PassCost(prior_s)
        self._wires: deque[float] = deque(maxlen=NUM_WIRES)
        self.wire_s = PRIOR_WIRE_S
        """Of a call and its answer, and of gathering the call with others: the median of the last few."""
        self._last: Timing | None = None

    def __repr__(self) -> str:
        return f"<EngineCost {self.passes}, wire {self.wire_s * 1e3:.1f} ms>"

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
            self._wires.append(max(0.0, elapsed_s - within_s))
            self.wire_s = _median(self._wires)
        if self._last is None or not _is_same(timing, self._last):
            self.passes.see(timing.num_rows / timing.num_passes, timing.computed_s / timing.num_passes, branches)
        self._last = timing

    def see_late(self, rows: float, num_passes: int, elapsed_s: float) -> None:
        """No answer after `elapsed_s`: each of its passes takes at least its share of that."""
        rows = max(rows, 1.0)
        self.passes.see(rows, max(elapsed_s / max(num_passes, 1), self.passes(rows)))


def _is_same(one: Timing, other: Timing) -> bool:
    """Whether two answers tell of the same passes."""
    is_same_work = (one.num_rows, one.num_passes) == (other.num_rows, other.num_passes)
    return is_same_work and math.isclose(one.computed_s, other.computed_s, rel_tol=1e-9)
