"""Closed forms of what speculation can gain. For documents and planning; no request uses them.

Expected yield and cost of a round as functions of alpha, gamma and c, for a chain of guesses that are accepted
independently. Factors are relative to plain decoding: above 1 is a gain in walltime, and a cost in operations and
memory accesses. Knows acceptance rates and costs; must not know engines, trees or sessions. Symbols: docs/notation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MAX_GAMMA = 64
"""Longest draft length that is searched. Without a cost (c = 0) every further guess would pay."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens of a round, including the target's own: (1 - alpha^(gamma+1)) / (1 - alpha).

    Source: Leviathan et al. 2023, equation 1.
    """
    return chain_tokens([alpha] * gamma)


def chain_tokens(alphas: Sequence[float]) -> float:
    """Expected tokens of a round if guess i is accepted with probability `alphas[i]`, given that all before it were."""
    survival, tokens = 1.0, 1.0
    for alpha in alphas:
        survival *= alpha
        tokens += survival
    return tokens


def expected_longest(alpha: float, gamma: int, num_drafts: int) -> float:
    """Expected accepted guesses of the best of `num_drafts` independent chains: sum_i 1 - (1 - alpha^i)^num_drafts.

    With one chain this is `expected_tokens` without the target's own token. Source: Stratos, Speculative Decoding,
    appendix A.
    """
    return math.fsum(1.0 - (1.0 - alpha**depth) ** num_drafts for depth in range(1, gamma + 1))


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Speedup if draft and target alternate: E / (gamma c + 1). Source: Leviathan et al. 2023, Theorem 3.8."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1.0)


def pipelined_factor(alpha: float, gamma: int, c: float, hit_rate: float = 1.0) -> float:
    """Speedup if the draft works during verification: E / (hit max(1, gamma c) + (1 - hit) (1 + gamma c)).

    After a hit the next block was drafted during verification; after a miss it is drafted after the verdict.
    """
    hit, miss = max(1.0, gamma * c), 1.0 + gamma * c
    return expected_tokens(alpha, gamma) / (hit_rate * hit + (1.0 - hit_rate) * miss)


def guaranteed_factor(alpha: float, c: float) -> float:
    """Speedup that some gamma at least reaches if alpha > c: (1 + alpha) / (1 + c). Otherwise no gamma gains anything.

    Source: Leviathan et al. 2023, Corollary 3.9.
    """
    return (1.0 + alpha) / (1.0 + c) if alpha > c else 1.0


def oracle_factor(alpha: float, c: float) -> float:
    """Speedup if each round drafted exactly the guesses that will be accepted: 1 / (1 - alpha + c alpha), or 1 if c >
    1.

    Source: Leviathan et al. 2023, section 3.5 (1 / (1 - alpha) tokens); includes the time to draft them.
    """
    cost = 1.0 - alpha + min(c, 1.0) * alpha
    return 1.0 / cost if cost else math.inf


def optimal_gamma(factor: Callable[[int], float], max_gamma: int = MAX_GAMMA) -> int:
    """The draft length from 0 to `max_gamma` with the largest factor; the shortest on ties."""
    return max(range(max_gamma + 1), key=factor)


def operations_factor(alpha: float, gamma: int, c_operations: float = 0.0) -> float:
    """Arithmetic operations per token, relative to plain decoding: (gamma c_operations + gamma + 1) / E.

    `c_operations` is the draft's operations per token over the target's. Source: Leviathan et al. 2023, Theorem 3.11.
    """
    return (gamma * c_operations + gamma + 1.0) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """Accesses to the target's weights and KV per token, relative to plain decoding: 1 / E. Source: Leviathan et al.
    2023, section 3.4."""
    return 1.0 / expected_tokens(alpha, gamma)
