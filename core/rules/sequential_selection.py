"""Sequential selection: of k tokens drawn independently at a place, the first that passes a fixed test is accepted.

Source: Sun et al. 2023, SpecTr (arXiv 2310.15141), k-SEQ. The paper's p is our q, and its q our p. With one token per
place it equals rejection.
"""

from __future__ import annotations

import numpy as np

from core.rules.chains import NEGLIGIBLE_MASS, law_of
from core.rules.coupled import GREEDY
from core.rules.drawn_trees import CERTAIN, Drawn, verify_drawn
from core.rules.rule import Float64, Outcome, Rule
from core.speculation import TokenTree

NUM_HALVINGS = 40
"""Bisection steps for rho. The remaining interval is below 1e-11, and its upper end is returned, which is exact."""


def division_factor(p: Float64, q: Float64, num_draws: int) -> float:
    """rho in [1, k] with 1 - (1 - beta)^k = rho beta, where beta(rho) = sum_x min(q, p / rho). Rounded up.

    A larger rho is also exact but accepts less. `p` and `q` may be restricted to the tokens with q > 0.
    """
    low, high = 1.0, float(num_draws)
    for _ in range(NUM_HALVINGS):
        rho = (low + high) / 2.0
        beta = float(np.minimum(q, p / rho).sum())
        is_enough = rho * beta >= 1.0 - (1.0 - beta) ** num_draws
        low, high = (low, rho) if is_enough else (rho, high)
    return high


def judge_in_sequence(p: Float64, drawn: Drawn) -> tuple[list[float], Float64]:
    """Try each draw with min(1, p(x) / (rho q(x))). If all fail: p - min(q, p / rho) (1 - (1 - beta)^k) / beta."""
    q, num_draws = drawn.distribution(len(p)), len(drawn.tokens)
    rho = division_factor(p[list(drawn.ids)], np.array(drawn.probs), num_draws)
    passing = np.minimum(q, p / rho)
    beta = float(passing.sum())
    factor = (1.0 - (1.0 - beta) ** num_draws) / beta if beta > 0.0 else rho
    residual = np.maximum(p - factor * passing, 0.0)
    if np.maximum(p - q, 0.0).sum() <= NEGLIGIBLE_MASS:  # p equals q: a failure can only be a rounding error
        return [CERTAIN], p
    if residual.sum() <= NEGLIGIBLE_MASS:  # all trials failing is nearly impossible, and the residual is rounding error
        residual = p
    return [float(p[token] / (rho * q[token])) for token in drawn.tokens], residual


def verify_in_sequence(block: TokenTree, p: Float64, seed: int, num_committed: int) -> Outcome:
    """Verify a block by sequential selection. `p` is [1 + nodes, V], each row summing to 1."""
    return verify_drawn(block, p, seed, num_committed, judge_in_sequence, with_replacement=True)


def _decide(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    return verify_in_sequence(block, law_of(log_p), seed, num_committed)


SEQUENTIAL_SELECTION = Rule(
    name="sequential_selection",
    needs_q=True,
    takes_trees=True,
    is_lossless=True,
    with_replacement=True,
    decide=_decide,
    at_zero=GREEDY,
)
