"""Lenient verification: a guess nearly as likely as the target's own token is accepted. Lossy, with a bound.

With shared noise G, a guess x is accepted if log p(x) + G(x) > max_y (log p(y) + G(y)) + log l, where l is the
lenience. No text z is then emitted with more than prod_i p(z_i) / l, whatever is guessed (docs/exactness.md). Lenience
1 is coupled verification. At temperature 0 there is no noise, p is the distribution at temperature 1, and x is
accepted if p(x) > l max p. Source of the rule at temperature 0: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5,
which prints the inequality the other way round. The rule with noise is its counterpart. Batched:
`workers.sampling.relaxed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from core import noise
from core.noise import Purpose
from core.rules.relaxed import values_of_guesses, verify_relaxed
from core.rules.rule import Float64, Outcome, Rule
from core.speculation import TokenTree


def merits(block: TokenTree, of_guesses: Sequence[float], largest: Sequence[float], lenience: float) -> list[float]:
    """Score of each guess minus the threshold it has to exceed. `largest` has the largest score of each row."""
    return [
        score - (largest[parent + 1] + math.log(lenience))
        for score, parent in zip(of_guesses, block.parents, strict=True)
    ]


def _verify(block: TokenTree, scores: Float64, lenience: float) -> Outcome:
    found = merits(block, values_of_guesses(block, scores), scores.max(axis=1).tolist(), lenience)
    return verify_relaxed(block, scores.argmax(axis=1).tolist(), found)


def _decide_coupled(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:
    gumbel = [
        noise.gumbel(seed, num_committed + depth, 0, Purpose.SHARED, log_p.shape[1]) for depth in (0, *block.depths)
    ]
    return _verify(block, (log_p.astype(np.float32) + np.stack(gumbel)).astype(np.float64), lenience)


def _decide_greedy(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    return _verify(block, log_p, lenience)


LENIENT_GREEDY = Rule(
    name="lenient_greedy",
    needs_q=False,
    takes_trees=True,
    is_lossless=False,
    takes_lenience=True,
    decide=_decide_greedy,
)
LENIENT_COUPLED = Rule(
    name="lenient_coupled",
    needs_q=False,
    takes_trees=True,
    is_lossless=False,
    takes_lenience=True,
    decide=_decide_coupled,
    at_zero=LENIENT_GREEDY,
)
