"""What has been accepted so far, as chances of what will be: on the whole, and by how sure the draft is.

Knows averages that fade; must not know tokens, costs or decisions. How sure the draft is tells most of what a text is
like at the moment, so nothing is learned for each session, depth or rank (docs/control.md has what that was worth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW = 64.0
"""Observations over which things are averaged; with 200 all is within 1% (seven loads of `bench ablation`)."""
PRIOR = 0.7
"""Of a chance, before anything was seen."""
MIN_CHANCE = 0.005
MAX_LOGIT = math.log((1.0 - MIN_CHANCE) / MIN_CHANCE)
"""No estimate is surer than this."""
MAX_CHANCE = 0.99
"""No guess counts for more."""
STEP = 0.05
"""In log odds, of a calibration, for a guess of which the opposite was certain. `bench ablation`: calibration is worth
1.01, and 1.13 where texts change; steps of 0.02 and 0.1 make the same within 1%."""
MAX_RANKS = 8
"""Candidates of a place of which the draft is told how likely they are."""


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

    Measured on the demo pair with shared noise; a candidate's own share beside it is worth 1.01 (`bench ablation`).
    """
    return float((1.0 + fanout) ** -1.2)


DRAWN_TAIL = (0.25, 0.11, 0.06)
"""Where the first of several draws of a place is not accepted: the chances of the second, the third, and so on, by
recursive rejection. The demo pair at T = 1, with q of 64 and of 1024 tokens: (0.19, 0.10, 0.04), (0.32, 0.13, 0.09)."""
WITH_REPLACEMENT_TAIL = (0.45,)
"""The same of draws that are independent: more of them than two make the first pass much more rarely (0.40 of four,
where recursive rejection has 0.68)."""
USUAL_TAIL = tuple(miss_curve(rank - 1) - miss_curve(rank) for rank in range(1, MAX_RANKS + 1))
"""Chances of the second candidate, the third, and so on, if it is not the first: the demo pair's, never learned."""


@dataclass(slots=True)
class Average:
    """Of the last observations, which fade; begins with what is expected."""

    value: float
    num_seen: int = 0
    prior_weight: float = WINDOW
    """The number of observations that what is expected counts for."""

    def observe(self, value: float) -> None:
        self.value += (value - self.value) / min(WINDOW, self.num_seen + self.prior_weight)
        self.num_seen += 1


@dataclass(slots=True)
class Calibration:
    """P(accepted | how sure the draft says it is): its own log odds, shifted by what was seen."""

    shift: float = 0.0

    def chance(self, confidence: float) -> float:
        """Of what comes with this confidence."""
        return logistic(self.shift + logit(confidence))

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """By the gradient of the log likelihood."""
        shift = self.shift + STEP * (is_accepted - self.chance(confidence))
        self.shift = min(max(shift, -MAX_LOGIT), MAX_LOGIT)
