"""Typical acceptance: a guess is accepted if it is likely enough, given the entropy of the target. Lossy.

A guess x is accepted if p(x) > min(EPSILON, DELTA e^(-H(p))), with H the entropy in nats. The target's own sample is
accepted, too, as in coupled verification. A token below the threshold is emitted with at most its probability under p.
At temperature 0 p is one-hot, and the rule is greedy decoding.
Source: Cai et al. 2024, Medusa (arXiv 2401.10774), section 3.2.1. Batched: `workers.sampling.relaxed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from core.noise import Purpose
from core.rules.coupled import GREEDY
from core.rules.relaxed import values_of_guesses, verify_relaxed
from core.rules.rule import Float64, Outcome, Rule, draw
from core.speculation import TokenTree

EPSILON = 0.09
"""A token with a higher probability is always accepted. The value of Medusa's authors."""
DELTA = 0.3
"""Square root of EPSILON. The value of Medusa's authors."""


def merits(block: TokenTree, of_guesses: Sequence[float], entropies: Sequence[float]) -> list[float]:
    """log p of each guess minus the threshold it has to exceed. `entropies` has the entropy of each row, in nats."""
    return [
        log_p - min(math.log(EPSILON), math.log(DELTA) - entropies[parent + 1])
        for log_p, parent in zip(of_guesses, block.parents, strict=True)
    ]


def _decide(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    positions = [num_committed + depth for depth in (0, *block.depths)]
    samples = [draw(row, seed, at, 0, Purpose.SHARED) for row, at in zip(log_p, positions, strict=True)]
    found = merits(block, values_of_guesses(block, log_p), [_entropy(row) for row in log_p])
    return verify_relaxed(block, samples, found)


def _entropy(log_p: Float64) -> float:
    possible = log_p[np.isfinite(log_p)]
    return float(-(np.exp(possible) * possible).sum())


TYPICAL = Rule(name="typical", needs_q=False, takes_trees=True, is_lossless=False, decide=_decide, at_zero=GREEDY)
