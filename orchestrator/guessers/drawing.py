"""Guesses that are drawn from what a guesser says, with noise of their own, one after the other.

Whether another one follows is decided before it is drawn, by what was said at its place and before it: so no block is
longer or shorter because of a draw of its own (docs/exactness.md, section 4). Knows laws and the noise; must not know
who says them, nor what they are worth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from core import noise
from core.noise import Purpose
from core.speculation import Guesses, SparseDistribution


def draw_chain(
    law_after: Callable[[Sequence[int]], SparseDistribution],
    goes_on: Callable[[Sequence[float]], bool],
    seed: int,
    num_committed: int,
) -> Guesses:
    """Draws in a row, each with the law that it is from; its chance is the largest probability of that law.

    `law_after` says what may follow the draws before, nothing where it does not know. `goes_on` is shown the chances up
    to the one that may be drawn next.
    """
    tokens, chances, laws = list[int](), list[float](), list[SparseDistribution]()
    while (law := law_after(tuple(tokens))).token_ids and goes_on([*chances, max(law.probs)]):
        row = len(tokens)
        tokens.append(draw_from(law, seed, num_committed + row, row))
        chances.append(max(law.probs))
        laws.append(law)
    return Guesses.chain(tokens, chances, laws)


def draw_from(law: SparseDistribution, seed: int, position: int, row: int) -> int:
    """A token with this law, which need not sum to 1 exactly: rules take it for normalised, too."""
    below = list(accumulate(law.probs))
    place = bisect_right(below, noise.uniform(seed, position, row, Purpose.GUESS) * below[-1])
    return law.token_ids[min(place, len(below) - 1)]
