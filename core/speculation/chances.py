"""How likely each candidate of the draft is to be the target's token.

The first candidate by how clearly it leads; the others by their share, and by what is usual at their rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.estimators import MAX_CHANCE, MAX_LOGIT, MIN_CHANCE
from core.growth import Candidates
from core.trees import Floats, Steady

LEAST = 1e-9
"""Of anything: what is told has one, also where it travels as a float of four bytes."""


def chances_of(said: Sequence[Candidates], told: Steady, num_candidates: int) -> list[list[float]]:
    """For each place, of the first `num_candidates` in order, as many as there are; none is likelier than the first.

    All places of a pass at once: numpy asks as much for one as for many.
    """
    if not said:
        return []
    intercept, slope = told.sureness
    leads = np.clip(np.array([each.lead for each in said]), MIN_CHANCE, 1.0 - MIN_CHANCE)
    log_odds = np.clip(np.log(leads / (1.0 - leads)), -MAX_LOGIT, MAX_LOGIT)
    heads = np.minimum(1.0 / (1.0 + np.exp(-(intercept + slope * log_odds))), MAX_CHANCE)[:, None]
    others = np.minimum((1.0 - heads) * _tails(said, told.tail), heads)
    rows = np.concatenate([heads, np.maximum(others, LEAST)], axis=1)[:, :num_candidates].tolist()
    return [row[: len(each.ranked)] for row, each in zip(rows, said, strict=True)]


def _tails(said: Sequence[Candidates], usual: Sequence[float]) -> Floats:
    """As likely together as they are on the whole; each by its share there and the root of what is usual at its rank,
    which foretells the demo target's token well, greedy and sampled (docs/adr/0010).  # [places, len(usual)]
    """
    shares = np.zeros((len(said), len(usual)))
    for place, each in enumerate(said):
        known = each.shares[1 : len(usual) + 1]
        shares[place, : len(known)] = known
    weights = shares * np.sqrt(np.array(usual, float))
    sums = weights.sum(axis=1, keepdims=True)
    found: Floats = np.where(sums > 0.0, weights * (sum(usual) / np.maximum(sums, np.finfo(float).tiny)), usual)
    return found
