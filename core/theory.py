"""What speculation can gain, in closed forms: for documents and planning, never on the path of a request.

What a round yields and costs, as a function of alpha, gamma and c: a chain of guesses, each accepted independently.
Factors are against plain decoding: above 1 is a gain in walltime, and a cost in operations and memory accesses. Knows
acceptance rates and costs; must not know engines, trees or sessions. Symbols: docs/notation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MAX_GAMMA = 64
"""Longest draft that is searched: without a cost (c = 0) every further guess would pay."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round, the target's own included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Source: Leviathan et al. 2023, equation 1.
    """
    return chain_tokens([alpha] * gamma)


def chain_tokens(alphas: Sequence[float]) -> float:
    """The same where a guess is accepted with `alphas[i]` if the i before it were."""
    survival, tokens = 1.0, 1.0
    for alpha in alphas:
        survival *= alpha
        tokens += survival
    return tokens


def expected_longest(alpha: float, gamma: int, num_drafts: int) -> float:
    """Guesses accepted of the best of several independent chains: sum_i 1 - (1 - alpha^i)^num_drafts.

    With one this is `expected_tokens` without the target's own. Source: Stratos, Speculative Decoding, appendix A.
    """
    return math.fsum(1.0 - (1.0 - alpha**depth) ** num_drafts for depth in range(1, gamma + 1))


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Speed with draft and target in turn: E / (gamma c + 1). Source: Leviathan et al. 2023, Theorem 3.8."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1.0)


def pipelined_factor(alpha: float, gamma: int, c: float, hit_rate: float = 1.0) -> float:
    """Speed with drafting behind verification: E / (hit max(1, gamma c) + (1 - hit) (1 + gamma c)).

    On a hit the next block has been drafted during the verification; on a miss it is drafted after the verdict.
    """
    hit, miss = max(1.0, gamma * c), 1.0 + gamma * c
    return expected_tokens(alpha, gamma) / (hit_rate * hit + (1.0 - hit_rate) * miss)


def guaranteed_factor(alpha: float, c: float) -> float:
    """Speed that some gamma reaches at least, if alpha > c: (1 + alpha) / (1 + c). No gamma gains anything otherwise.

    Source: Leviathan et al. 2023, Corollary 3.9.
    """
    return (1.0 + alpha) / (1.0 + c) if alpha > c else 1.0


def oracle_factor(alpha: float, c: float) -> float:
    """Speed if every round had as many guesses as will be accepted: 1 / (1 - alpha + c alpha), or 1 where c > 1.

    Source: Leviathan et al. 2023, section 3.5 (1 / (1 - alpha) tokens); the time of the guesses is counted.
    """
    cost = 1.0 - alpha + min(c, 1.0) * alpha
    return 1.0 / cost if cost else math.inf


def optimal_gamma(factor: Callable[[int], float], max_gamma: int = MAX_GAMMA) -> int:
    """The draft length, 0 to `max_gamma`, with the largest factor; the shortest of those that are equal."""
    return max(range(max_gamma + 1), key=factor)


def operations_factor(alpha: float, gamma: int, c_operations: float = 0.0) -> float:
    """Arithmetic operations a token: (gamma c_operations + gamma + 1) / E.

    `c_operations` is the draft's operations a token over the target's. Source: Leviathan et al. 2023, Theorem 3.11.
    """
    return (gamma * c_operations + gamma + 1.0) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """Accesses to the target's weights and KV a token: 1 / E. Source: Leviathan et al. 2023, section 3.4."""
    return 1.0 / expected_tokens(alpha, gamma)
