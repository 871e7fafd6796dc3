"""Sampling a chain of guesses from a guesser's distributions, with separate noise.

Whether another guess is drawn is decided before it is drawn, from the distributions up to its position. The length of a
block therefore never depends on its own draws (docs/exactness.md, section 4). Knows distributions and noise; must not
know guessers or their worth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from core import noise
from core.noise import Purpose
from core.speculation import Guesses, SparseDistribution


def draw_chain(
    distribution_after: Callable[[Sequence[int]], SparseDistribution],
    goes_on: Callable[[Sequence[float]], bool],
    seed: int,
    num_committed: int,
) -> Guesses:
    """Draw a chain. Each guess has the distribution it was drawn from; its chance is that distribution's largest
    probability.

    `distribution_after` returns the distribution after the draws so far, empty if unknown. `goes_on` gets the
    chances up to the guess that may be drawn next.
    """
    tokens, chances, distributions = list[int](), list[float](), list[SparseDistribution]()
    while (q := distribution_after(tuple(tokens))).token_ids and goes_on([*chances, max(q.probs)]):
        row = len(tokens)
        tokens.append(draw_from(q, seed, num_committed + row, row))
        chances.append(max(q.probs))
        distributions.append(q)
    return Guesses.chain(tokens, chances, distributions)


def draw_from(q: SparseDistribution, seed: int, position: int, row: int) -> int:
    """Draw a token from a distribution that need not sum to exactly 1; rules normalise it, too."""
    below = list(accumulate(q.probs))
    index = bisect_right(below, noise.uniform(seed, position, row, Purpose.GUESS) * below[-1])
    return q.token_ids[min(index, len(below) - 1)]
