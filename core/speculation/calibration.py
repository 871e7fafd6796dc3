"""What has been accepted so far, as chances of what will be: by depth, and by how sure the draft is.

Knows counts that fade; must not know tokens, costs or decisions. How sure the draft is tells most of what a text is
like at the moment, so nothing is learned for each session, or for each of the draft's ranks (docs/control.md has what
that was worth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

MIN_CHANCE = 0.005
MAX_LOGIT = math.log((1.0 - MIN_CHANCE) / MIN_CHANCE)
MAX_CHANCE = 0.99
"""No estimate is surer than this."""
PRIOR_LOGIT = 0.85
"""Log odds of acceptance before any was seen: 0.7."""


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


class DepthRates:
    """How often guesses are accepted, by their depth, given that those before them were.

    Few see the deep places, so each is shrunk to the one before it.
    """

    def __init__(self, prior: float, *, weight: float, window: float, depth: int = 16) -> None:
        self.rates = [Rate(prior, weight, window) for _ in range(max(depth, 1))]

    def __repr__(self) -> str:
        return f"<DepthRates {', '.join(f'{chance:.2f}' for chance in self.chances(len(self.rates)))}>"

    def see(self, depth: int, is_accepted: bool) -> None:
        """`depth`: counted from 1."""
        self.rates[min(depth, len(self.rates)) - 1].see(is_accepted)

    def see_chain(self, num_guesses: int, num_accepted: int) -> None:
        """That many guesses in a row, and how many of them were accepted."""
        for depth in range(1, min(num_accepted + 1, num_guesses) + 1):
            self.see(depth, depth <= num_accepted)

    def chances(self, num_tokens: int) -> list[float]:
        """Chance that each of `num_tokens` guesses in a row is accepted, given that those before it are."""
        found, before = [], self.rates[0].prior
        for depth in range(num_tokens):
            before = self.rates[min(depth, len(self.rates) - 1)].mean(before)
            found.append(before)
        return found

    def survival(self, num_tokens: int) -> list[float]:
        """The same, together with those before it."""
        return list(accumulate(self.chances(num_tokens), mul))


@dataclass(slots=True)
class ConfidenceFit:
    """P(accept | confidence), in logits: `intercept + slope * (x - mean x)`.

    x is the log odds of the draft's confidence, or of its lead (`core.speculation.candidates`), not of both. Online
    Newton steps with fading curvature; where confidence says nothing, or is always the same, the slope is 0.
    """

    window: float = 500.0
    intercept: float = PRIOR_LOGIT
    slope: float = 0.0
    mean_x: float = 0.0
    seen: float = 0.0
    curvature: tuple[float, float, float] = (20.0, 0.0, 20.0)
    """Of the two parameters: (intercept, intercept), (intercept, slope), (slope, slope)."""

    def line(self) -> tuple[float, float]:
        """a and b: log odds of acceptance are a + b times the log odds of the confidence."""
        return self.intercept - self.slope * self.mean_x, self.slope

    def see(self, confidence: float, is_accepted: bool) -> None:
        x = logit(confidence)
        self.seen += 1.0
        self.mean_x += (x - self.mean_x) / min(self.seen, self.window)
        x -= self.mean_x
        chance = min(logistic(self.intercept + self.slope * x), MAX_CHANCE)
        error, weight, keep = is_accepted - chance, chance * (1.0 - chance), 1.0 - 1.0 / self.window
        a, b, c = self.curvature
        a, b, c = a * keep + weight, b * keep + weight * x, c * keep + weight * x * x
        a, c = max(a, 20.0), max(c, 20.0)
        self.curvature = (a, b, c)
        determinant = a * c - b * b
        self.intercept += error * (c - b * x) / determinant
        self.slope += error * (a * x - b) / determinant
        self.slope = min(max(self.slope, 0.0), 2.0)
        self.intercept = min(max(self.intercept, -MAX_LOGIT), MAX_LOGIT)
