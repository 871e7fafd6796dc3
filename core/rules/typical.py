"""Typical acceptance: a guess stands where the target finds it likely enough for how sure it is. Lossy.

A guess x stands if p(x) > min(EPSILON, DELTA e^(-H(p))), H the entropy in nats; beside it what the target draws, as in
coupled verification. A token that is no likelier than that comes at most as often as p has it. At temperature 0 p is
one-hot, and the rule is greedy decoding.
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
"""A token likelier than this always stands. As Medusa's authors set it."""
DELTA = 0.3
"""The root of EPSILON, as Medusa's authors set it."""


def merits(block: TokenTree, of_guesses: Sequence[float], entropies: Sequence[float]) -> list[float]:
    """How far each guess's log p is above what it has to exceed; `entropies` are the rows'."""
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
