"""How much is accepted, as a function of p and q: of one guess, of one of several, of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Survival = Callable[[Float64], float]
"""Ratios p(x_i) / q(x_i) of the first i guesses -> probability that all of them are accepted."""


def acceptance_rate(p: Float64, q: Float64) -> float:
    """alpha of rejection: 1 - TV(p, q). Source: Leviathan et al. 2023, Theorem 3.5 and Corollary 3.6."""
    return float(np.minimum(p, q).sum())


def divergence(p: Float64, q: Float64) -> float:
    """D_LK: 1 - sum_x min(p(x), q(x)), the total variation distance. Source: Leviathan et al. 2023, Lemma 3.3."""
    return 1.0 - acceptance_rate(p, q)


def acceptance_rate_of_several(p: Float64, qs: Sequence[Float64]) -> float:
    """Return the chance that one of several guesses at the same place is accepted.

    Each is drawn from its q, and they are judged in this order. After a rejection p is replaced by its residual,
    (p - q)+ normalised. Source: Stratos, Speculative Decoding, section 2, after SpecInfer.
    """
    rejected = 1.0
    for q in qs:
        alpha = acceptance_rate(p, q)
        rejected *= 1.0 - alpha
        residual = np.maximum(p - q, 0.0)
        if not residual.any():
            return 1.0
        p = residual / residual.sum()
    return 1.0 - rejected


def coupled_acceptance_rate(p: Float64, q: Float64) -> float:
    """alpha of coupled sampling: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). Source: Daliri et al. 2024."""
    both = (p > 0) & (q > 0)
    denominators = np.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None]).sum(axis=1)
    return float((1.0 / denominators).sum())


def coupled_lower_bound(p: Float64, q: Float64) -> float:
    """(1 - TV) / (1 + TV), the most that sampling without communication can promise. Source: Daliri et al. 2024."""
    alpha = acceptance_rate(p, q)
    return alpha / (2.0 - alpha)


def rejection_survival(ratios: Float64) -> float:
    """prod_i min(r_i, 1)."""
    return float(np.minimum(ratios, 1.0).prod())


def block_survival(ratios: Float64) -> float:
    """w_i = min(w_(i-1) r_i, 1), never less than rejection's. Source: Sun et al. 2024, Algorithm 2."""
    weight = 1.0
    for ratio in ratios:
        weight = min(weight * float(ratio), 1.0)
    return weight


def joint_survival(ratios: Float64) -> float:
    """min(prod_i r_i, 1): the bound for a verifier that knew the joint law of whole blocks."""
    return min(float(ratios.prod()), 1.0)


def expected_accepted(p: Float64, q: Float64, gamma: int, survival: Survival) -> float:
    """Guesses accepted of `gamma` when p and q do not depend on the context; sums over V^gamma blocks."""
    total = 0.0
    for length in range(1, gamma + 1):
        for block in product(np.flatnonzero(q), repeat=length):
            ids = list(block)
            total += float(q[ids].prod()) * survival(p[ids] / q[ids])
    return total
