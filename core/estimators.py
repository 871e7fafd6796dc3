"""What has been accepted so far, as chances of what will be: by depth, by rank, by the draft's confidence.

Knows counts that fade; must not know tokens, costs or decisions. Acceptance is neither independent from place to place
nor the same for all texts, so there is no single alpha: the profile over depth and rank is learned from all sessions
together, and each session adds one number, how much easier or harder than that its text is at the moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from core.shapes import RankLaw, Ranks
from core.trees import ROOT, UNRANKED

MIN_CHANCE = 0.005
MAX_LOGIT = math.log((1.0 - MIN_CHANCE) / MIN_CHANCE)
MAX_CHANCE = 0.99
"""No estimate is surer than this."""
LEVEL_STEP = 0.5
"""Grain of a session's level, in logits: sessions that are nearly alike share what is worked out for them."""
TOLERANCE = 0.2
"""Logits by which an estimate may drift before what was worked out from it is worked out anew."""


def logit(chance: float) -> float:
    """Log odds, of a chance kept away from 0 and 1."""
    if chance <= MIN_CHANCE:
        return -MAX_LOGIT
    return math.log(chance / (1.0 - chance)) if chance < 1.0 - MIN_CHANCE else MAX_LOGIT


def logistic(log_odds: float) -> float:
    """The chance with these log odds."""
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds >= 0 else 1.0 - 1.0 / (1.0 + math.exp(log_odds))


def miss_curve(fanout: int) -> float:
    """Chance that a correction is not among the draft's `fanout` likeliest others: (1 + F)^-1.2.

    Measured on the demo pair with shared noise; a prior, until corrections have been seen.
    """
    return float((1.0 + fanout) ** -1.2)


@dataclass(slots=True)
class Rate:
    """A chance, from outcomes that fade with a window and a prior worth `weight` outcomes."""

    prior: float
    weight: float = 8.0
    window: float = 400.0
    seen: float = 0.0
    successes: float = 0.0

    def see(self, is_success: bool) -> None:
        keep = 1.0 - 1.0 / self.window
        self.seen = self.seen * keep + 1.0
        self.successes = self.successes * keep + is_success

    def mean(self, prior: float | None = None) -> float:
        """The estimate; with `prior`, as if that had been expected."""
        expected = self.prior if prior is None else prior
        return (self.successes + self.weight * expected) / (self.seen + self.weight)


@dataclass(frozen=True, slots=True)
class Placed:
    """What a verdict says of one place of a block, or of the place where its path ended."""

    depth: int
    """Of the token in question, counted from 1."""
    taken: tuple[int, ...]
    """Ranks that the block guessed there."""
    rank: int | None
    """Rank of the target's token, None when it is not one of those that can be told."""
    num_known: int
    """Ranks below this one are known to be it, or not."""


def placed(
    parents: Sequence[int], ranks: Sequence[int], path: Sequence[int], rank: int | None, num_listed: int
) -> list[Placed]:
    """A verdict place by place, as far as the path is the draft's own guesses. `rank` is that of the token behind these
    among the `num_listed` others that it has told of there.
    """
    path = tuple(takewhile(lambda node: ranks[node] != UNRANKED, path))
    places = (ROOT, *path)
    guessed: dict[int, list[int]] = {place: [] for place in places}
    for parent, own in zip(parents, ranks, strict=True):
        if parent in guessed and own != UNRANKED:
            guessed[parent].append(own)
    found: list[Placed] = []
    for depth, (place, node) in enumerate(zip(places, path, strict=False), start=1):
        taken = tuple(sorted(guessed[place]))
        found.append(Placed(depth, taken, ranks[node], _num_contiguous(taken)))
    found.append(_end(len(places), tuple(sorted(guessed[places[-1]])), rank, num_listed))
    return found


def _num_contiguous(taken: Sequence[int]) -> int:
    num = 0
    while num < len(taken) and taken[num] == num:
        num += 1
    return num


def _end(depth: int, taken: tuple[int, ...], rank: int | None, num_listed: int) -> Placed:
    free = [place for place in range(len(taken) + num_listed + 1) if place not in taken]
    listed = sorted((*taken, *free[:num_listed]))
    return Placed(depth, taken, None if rank is None else free[rank], _num_contiguous(listed))


class RankProfile:
    """Acceptance by depth and rank, shared by all sessions of one kind of verification.

    Each rank is a hazard: the chance that the target's token is that candidate, given that it is none before it. A
    tree that lists five outcomes and misses says something about five of them and nothing about the sixth.
    """

    def __init__(self, max_depth: int, num_ranks: int = 32, *, prior: float = 0.7) -> None:
        self._heads = [Rate(prior, weight=12.0, window=600.0) for _ in range(max(max_depth, 1))]
        self._tail = [Rate(1 - miss_curve(rank) / miss_curve(rank - 1)) for rank in range(1, num_ranks)]
        self._frozen: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        self._laws: dict[float, RankLaw] = {}

    def __repr__(self) -> str:
        return f"<RankProfile {', '.join(f'{head:.2f}' for head in self.heads())}>"

    @property
    def num_seen(self) -> float:
        """Verdicts on a first guess, recent ones first."""
        return self._heads[0].seen

    def see(self, place: Placed) -> None:
        """One place of a verdict."""
        if place.num_known:
            self._heads[min(place.depth, len(self._heads)) - 1].see(place.rank == 0)
            if place.rank != 0:
                self._see_hazards(self._tail, None if place.rank is None else place.rank - 1, place.num_known - 1)

    @staticmethod
    def _see_hazards(hazards: Sequence[Rate], rank: int | None, num_known: int) -> None:
        for index, hazard in enumerate(hazards[:num_known]):
            hazard.see(index == rank)
            if index == rank:
                return

    def heads(self, level: float = 0.0) -> tuple[float, ...]:
        """Chance of the first candidate by depth, in a text that is `level` logits easier than most.

        Few see the deep places, so each is shrunk to the one before it.
        """
        found: list[float] = []
        for head in self._heads:
            found.append(head.mean(found[-1] if found else None))
        return tuple(min(logistic(logit(head) + level), MAX_CHANCE) for head in found)

    def law(self, level: float = 0.0) -> RankLaw:
        """All chances, as they were when they last had drifted noticeably: what is planned for a law holds a while."""
        now = self.heads(), tuple(rate.mean() for rate in self._tail)
        if self._frozen is None or _has_drifted(self._frozen, now):
            self._frozen = now
            self._laws.clear()
        law = self._laws.get(level)
        if law is None:
            law = self._laws[level] = _law(*self._frozen, level)
        return law


def _has_drifted(then: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> bool:
    """Whether any of the likelier chances has moved; what is rare may move further."""
    near, far = (list(zip(before, after, strict=True)) for before, after in zip(then, now, strict=True))
    return any(abs(logit(a) - logit(b)) > TOLERANCE for a, b in near) or any(
        abs(logit(a) - logit(b)) > 2.0 * TOLERANCE for a, b in far[:8]
    )


def _law(heads: Sequence[float], tail: Sequence[float], level: float) -> RankLaw:
    return RankLaw(tuple(_ranks(min(logistic(logit(head) + level), MAX_CHANCE), tail) for head in heads))


def _ranks(head: float, hazards: Sequence[float]) -> Ranks:
    """Chances from hazards; a later candidate never counts as likelier than an earlier one."""
    found = [head]
    left = 1.0 - head
    for hazard in hazards:
        found.append(min(left * hazard, found[-1]))
        left *= 1.0 - hazard
    return tuple(found)


@dataclass(slots=True)
class Level:
    """How much easier (above 0) or harder a session's text is than most, in logits of acceptance.

    The penalised maximum likelihood shift of the shared profile, over a window of rounds.
    """

    window_rounds: float = 32.0
    stiffness: float = 5.0
    """Weight of the prior, that a session is like the others."""
    seen: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    shift: float = 0.0
    """The level, as it was estimated last."""
    rounded: float = 0.0
    """The same in steps of `LEVEL_STEP`."""

    def fade(self) -> None:
        """A round has passed."""
        keep = 1.0 - 1.0 / self.window_rounds
        self.seen = [count * keep for count in self.seen]
        self.successes = [count * keep for count in self.successes]

    def see(self, depth: int, is_success: bool) -> None:
        while len(self.seen) < depth:
            self.seen.append(0.0)
            self.successes.append(0.0)
        self.seen[depth - 1] += 1.0
        self.successes[depth - 1] += is_success

    def estimate(self, heads: Sequence[float]) -> float:
        """The level over a profile, in steps of `LEVEL_STEP`: Newton's method, which goes on where it stopped last."""
        shift = self.shift
        for _ in range(2):
            slope, curve = -self.stiffness * shift, self.stiffness
            for index, seen in enumerate(self.seen):
                chance = logistic(logit(heads[min(index, len(heads) - 1)]) + shift)
                slope += self.successes[index] - seen * chance
                curve += seen * chance * (1.0 - chance)
            shift = min(max(shift + slope / curve, -4.0), 4.0)
        self.shift = shift
        self.rounded = rounded_level(shift, self.rounded)
        return self.rounded


def rounded_level(level: float, before: float) -> float:
    """In steps of `LEVEL_STEP`; as `before` until it is clearly another."""
    return round(level / LEVEL_STEP) * LEVEL_STEP if abs(level - before) > 0.7 * LEVEL_STEP else before


@dataclass(slots=True)
class ConfidenceFit:
    """P(accept | confidence), as logits added to what is expected at that depth: `intercept + slope * (x - mean x)`.

    x is the log odds of the draft's confidence, or of its lead (`core.growth`), not of both. Online Newton steps with
    fading curvature; where confidence says nothing, or is always the same, the expectation stays as it was.
    """

    window: float = 500.0
    intercept: float = 0.0
    slope: float = 0.0
    mean_x: float = 0.0
    seen: float = 0.0
    curvature: tuple[float, float, float] = (20.0, 0.0, 20.0)
    """Of the two parameters: (intercept, intercept), (intercept, slope), (slope, slope)."""

    def line(self, expected: float) -> tuple[float, float]:
        """a and b, where `expected` is usual: log odds of acceptance are a + b times the log odds of the confidence."""
        return logit(expected) + self.intercept - self.slope * self.mean_x, self.slope

    def _shifted(self, expected: float, x: float) -> float:
        return min(logistic(logit(expected) + self.intercept + self.slope * x), MAX_CHANCE)

    def see(self, expected: float, confidence: float, is_accepted: bool) -> None:
        x = logit(confidence)
        self.seen += 1.0
        self.mean_x += (x - self.mean_x) / min(self.seen, self.window)
        x -= self.mean_x
        chance = self._shifted(expected, x)
        error, weight, keep = is_accepted - chance, chance * (1.0 - chance), 1.0 - 1.0 / self.window
        a, b, c = self.curvature
        a, b, c = a * keep + weight, b * keep + weight * x, c * keep + weight * x * x
        a, c = max(a, 20.0), max(c, 20.0)
        self.curvature = (a, b, c)
        determinant = a * c - b * b
        self.intercept += error * (c - b * x) / determinant
        self.slope += error * (a * x - b) / determinant
        self.slope = min(max(self.slope, 0.0), 2.0)
        self.intercept = min(max(self.intercept, -2.0), 2.0)
