"""Recursive rejection: each token drawn at a place is tried against the residual that earlier trials have left of p.

Sources: Miao et al. 2024, SpecInfer (arXiv 2305.09781), Algorithm 2, for independent draws; Jeon et al. 2024
(arXiv 2402.14160) and Chen et al. 2024, Sequoia (arXiv 2402.12374) for draws without replacement, as here. With one
token per place it equals rejection.
"""

from __future__ import annotations

import numpy as np

from core.rules.chains import NEGLIGIBLE_MASS, law_of
from core.rules.coupled import GREEDY
from core.rules.drawn_trees import CERTAIN, Drawn, verify_drawn
from core.rules.rule import Float64, Outcome, Rule
from core.speculation import TokenTree


def judge_recursively(p: Float64, drawn: Drawn) -> tuple[list[float], Float64]:
    """Try x_1, x_2, ... with min(1, p_i(x_i) / q_i(x_i)). If x_i fails, p_{i+1} is (p_i - q_i)+, normalised.

    q_i is q without the tokens before x_i, normalised: the distribution of x_i given these tokens.
    """
    q, chances = drawn.distribution(len(p)), list[float]()
    for token in drawn.tokens:
        q_left = q / q.sum()
        residual = np.maximum(p - q_left, 0.0)
        mass = float(residual.sum())
        is_exhausted = mass <= NEGLIGIBLE_MASS  # p equals q: a failure can only be a rounding error
        chances.append(CERTAIN if is_exhausted else float(p[token] / q_left[token]))
        if is_exhausted:
            break
        p = residual / mass
        q[token] = 0.0
    return chances, p


def verify_recursively(block: TokenTree, p: Float64, seed: int, num_committed: int) -> Outcome:
    """Verify a block by recursive rejection. `p` is [1 + nodes, V], each row summing to 1."""
    return verify_drawn(block, p, seed, num_committed, judge_recursively, with_replacement=False)


def _decide(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    return verify_recursively(block, law_of(log_p), seed, num_committed)


RECURSIVE_REJECTION = Rule(
    name="recursive_rejection", needs_q=True, takes_trees=True, is_lossless=True, decide=_decide, at_zero=GREEDY
)
