"""How likely each candidate of the draft is to be the target's token.

The first candidate by how clearly it leads; the others by their share, and by what is usual at their rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.estimators import MAX_CHANCE, logistic, logit
from core.growth import Candidates
from core.trees import Steady

MIN_CHANCE = 1e-9
"""Of anything: what is told has one, also where it travels as a float of four bytes."""


def chances_of(candidates: Candidates, told: Steady, num_candidates: int) -> list[float]:
    """Of the first `num_candidates`, in order; a later one is never likelier than the first."""
    intercept, slope = told.sureness
    head = min(logistic(intercept + slope * logit(candidates.lead)), MAX_CHANCE)
    num_others = min(num_candidates, len(candidates.ranked)) - 1
    others = _tail(candidates, told.tail)[: max(num_others, 0)]
    return [head, *(max(min((1.0 - head) * chance, head), MIN_CHANCE) for chance in others)]


def _tail(candidates: Candidates, usual: Sequence[float]) -> Sequence[float]:
    """As likely together as they are on the whole; each by its share here and the root of what is usual at its rank,
    which foretells the demo target's token well, greedy and sampled (docs/adr/0010).
    """
    weights = [math.sqrt(chance) * share for chance, share in zip(usual, candidates.shares[1:], strict=False)]
    total = sum(weights)
    if not total:
        return usual
    scale = sum(usual) / total
    return [weight * scale for weight in weights]
