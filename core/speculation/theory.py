"""What speculation can gain: expected tokens, walltime and acceptance, as functions of p, q, gamma and c.

Knows closed forms only; for tests, documents and planning, never on the path of a request. Symbols: docs/notation.md.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Survival = Callable[[Float64], float]
"""Ratios p(x_i) / q(x_i) of the first i guesses -> probability that all of them are accepted."""


def acceptance_rate(p: Float64, q: Float64) -> float:
    """alpha of rejection: 1 - TV(p, q). Source: Leviathan et al. 2023, Theorem 3.5 and Corollary 3.6."""
    return float(np.minimum(p, q).sum())


def coupled_acceptance_rate(p: Float64, q: Float64) -> float:
    """alpha of coupled sampling: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). Source: Daliri et al. 2024."""
    both = (p > 0) & (q > 0)
    denominators = np.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None]).sum(axis=1)
    return float((1.0 / denominators).sum())


def coupled_lower_bound(p: Float64, q: Float64) -> float:
    """(1 - TV) / (1 + TV), the most that sampling without communication can promise. Source: Daliri et al. 2024."""
    alpha = acceptance_rate(p, q)
    return alpha / (2.0 - alpha)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round, the target's own included, when each guess is accepted with probability alpha, independently.

    (1 - alpha^(gamma+1)) / (1 - alpha). Source: Leviathan et al. 2023, equation 1.
    """
    return float(sum(alpha**i for i in range(gamma + 1)))


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Speed against plain decoding, draft and target in turn. Source: Leviathan et al. 2023, Theorem 3.8."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1.0)


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
