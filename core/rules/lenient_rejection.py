"""Rejection with lenience l: a guess x ~ q is accepted with probability min(1, p(x) / (l q(x))). Lossy, with a bound.

No token has a probability above p / l, given any text before it (docs/exactness.md). Lenience 1 is rejection.
Source: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5. After a rejection the residual is that of rejection,
(p - q)+, so no correction has a probability above p. Batched: `workers.sampling.chains`.
"""

from __future__ import annotations

from core.rules import chains
from core.rules.lenient import LENIENT_GREEDY
from core.rules.rule import Float64, Outcome, Rule
from core.speculation import TokenTree


def _decide(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:
    return chains.verify_rejection(block, chains.law_of(log_p), seed, num_committed, lenience)


LENIENT_REJECTION = Rule(
    name="lenient_rejection",
    needs_q=True,
    takes_trees=False,
    is_lossless=False,
    takes_lenience=True,
    decide=_decide,
    at_zero=LENIENT_GREEDY,
)
