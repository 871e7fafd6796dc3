"""Acceptance estimated from past observations: on average, and by the draft's confidence.

Knows fading averages; must not know tokens, costs or decisions. Nothing is learned per session, depth or rank: the
draft's confidence already reflects the current text (docs/control.md has the measurements).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW = 64.0
"""Number of observations in an average. With 200 everything stays within 1% (seven loads of `bench ablation`)."""
PRIOR = 0.7
"""Assumed chance before any observation."""
MIN_CHANCE = 0.005
"""Smallest estimated chance."""
MAX_LOGIT = math.log((1.0 - MIN_CHANCE) / MIN_CHANCE)
"""Bound of every log odds."""
MAX_CHANCE = 0.99
"""Largest chance of a guess."""
STEP = 0.05
"""Largest change of a calibration by one observation, in log odds. Calibration is worth 1.01, and 1.13 where texts
change (`bench ablation`); steps of 0.02 and 0.1 are within 1%."""
MAX_REPORTED = 8
"""Largest number of candidates of a node that a draft reports, with their chances."""


def logit(chance: float) -> float:
    """Log odds of a chance, within [-MAX_LOGIT, MAX_LOGIT]."""
    if chance <= MIN_CHANCE:
        return -MAX_LOGIT
    return math.log(chance / (1.0 - chance)) if chance < 1.0 - MIN_CHANCE else MAX_LOGIT


def logistic(log_odds: float) -> float:
    """The chance with these log odds."""
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds >= 0 else 1.0 - 1.0 / (1.0 + math.exp(log_odds))


def miss_curve(fanout: int) -> float:
    """Chance that a correction is not among the draft's `fanout` likeliest other candidates: (1 + F)^-1.2.

    Measured on the demo pair with shared noise. Using the share of each candidate, too, is worth 1.01 (`bench
    ablation`).
    """
    return float((1.0 + fanout) ** -1.2)


DRAWN_TAIL = (0.25, 0.11, 0.06)
"""Chances of the second draw, the third, ..., if the first of several draws is not accepted, by recursive rejection.
The demo pair at T = 1 has (0.19, 0.10, 0.04) with q of 64 tokens and (0.32, 0.13, 0.09) with 1024."""
WITH_REPLACEMENT_TAIL = (0.45,)
"""Like `DRAWN_TAIL`, for independent draws. With more than two of them the first is accepted much less often (0.40 with
four, against 0.68 by recursive rejection)."""
USUAL_TAIL = tuple(miss_curve(rank - 1) - miss_curve(rank) for rank in range(1, MAX_REPORTED + 1))
"""Chances of the second candidate, the third, ..., if the first is wrong. Measured on the demo pair; never learned."""


@dataclass(slots=True)
class Average:
    """Fading average of recent observations. Starts at the expected value."""

    value: float
    num_seen: int = 0
    prior_weight: float = WINDOW
    """Number of observations that the expected value counts for."""

    def observe(self, value: float) -> None:
        self.value += (value - self.value) / min(WINDOW, self.num_seen + self.prior_weight)
        self.num_seen += 1


@dataclass(slots=True)
class Calibration:
    """P(accepted | draft's confidence): the confidence's log odds plus a learned shift."""

    shift: float = 0.0

    def chance(self, confidence: float) -> float:
        """Chance that a guess with this confidence is accepted."""
        return logistic(self.shift + logit(confidence))

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """Take one gradient step of the log likelihood."""
        shift = self.shift + STEP * (is_accepted - self.chance(confidence))
        self.shift = min(max(shift, -MAX_LOGIT), MAX_LOGIT)
