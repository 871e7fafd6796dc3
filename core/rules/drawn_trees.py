"""Verification of trees of draws: the tokens drawn at a place are tried one after the other.

A place is the root or a node of the block. Each child of a place carries all tokens drawn there
(`SparseDistribution.draws`), so every draw is tried even if it has no node in the block. The probability that a trial
passes depends on the rule: `core.rules.recursive_rejection`, `core.rules.sequential_selection`. Knows blocks, p, q and
the noise; must not know the source of a guess. Proofs: docs/exactness.md. Batched: `workers.sampling.drawn_trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from core import noise
from core.noise import Purpose
from core.rules.chains import can_have_drawn, normalised
from core.rules.rule import Float64, Outcome, draw
from core.speculation import ROOT, SparseDistribution, TokenTree

CERTAIN = 2.0
"""Chance of a trial that always passes: above every uniform number in (0, 1)."""


class Drawn(NamedTuple):
    """Tokens drawn at one place, in the order of drawing, and the distribution they were drawn from."""

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    probs: tuple[float, ...]
    """Probabilities of `ids`, in float64, summing to 1."""

    def distribution(self, vocab_size: int) -> Float64:
        """q [V]."""
        q = np.zeros(vocab_size)
        q[list(self.ids)] = self.probs
        return q


Judge: TypeAlias = Callable[[Float64, Drawn], tuple[list[float], Float64]]
"""(p [V], draws) -> the chance that each trial passes given that all before it failed, and the residual [V] to draw
from if all fail. The residual need not be normalised."""


def verify_drawn(
    block: TokenTree, p: Float64, seed: int, num_committed: int, judge: Judge, *, with_replacement: bool
) -> Outcome:
    """Verify a block by the rule that `judge` implements. `p` is [1 + nodes, V], each row summing to 1."""
    drawn_at = draws_of(block, p.shape[1], with_replacement=with_replacement)
    judged = {place: judge(p[place + 1], drawn) for place, drawn in drawn_at.items()}

    def next_token(place: int, depth: int) -> int:
        purpose = Purpose.RESIDUAL if place in judged else Purpose.BONUS
        with np.errstate(divide="ignore"):
            log_law = np.log(judged[place][1] if place in judged else p[place + 1])
        return draw(log_law, seed, num_committed + depth, depth, purpose)

    return walk(block, drawn_at, lambda place: judged[place][0], next_token, seed, num_committed)


def walk(
    block: TokenTree,
    drawn_at: Mapping[int, Drawn],
    chances_at: Callable[[int], Sequence[float]],
    next_token: Callable[[int, int], int],
    seed: int,
    num_committed: int,
) -> Outcome:
    """Walk down from the root; at each place, the first draw whose trial passes is accepted.

    A passing draw without a node ends the block as its next token. `next_token(place, depth)` draws the next token if
    no trial passes or nothing was drawn at the place.
    """
    place, path = ROOT, list[int]()
    while (drawn := drawn_at.get(place)) is not None:
        chances, depth = chances_at(place), len(path)
        passing = first_passing(chances, trial_uniforms(len(chances), seed, num_committed, depth))
        if passing is None:
            break
        child = block.child(place, drawn.tokens[passing])
        if child is None:
            return Outcome(tuple(path), drawn.tokens[passing])
        path.append(child)
        place = child
    return Outcome(tuple(path), next_token(place, len(path)))


def draws_of(block: TokenTree, vocab_size: int, *, with_replacement: bool) -> dict[int, Drawn]:
    """The draws by place. A place whose draws cannot come from their q has none.

    A draft that follows the protocol never loses draws, so this changes no distribution.
    """
    found: dict[int, Drawn] = {}
    seen: set[int] = set()
    for parent, token, q in zip(block.parents, block.tokens, block.q, strict=False):
        if parent not in seen:
            seen.add(parent)
            tokens = q.draws or (token,)
            if _is_sound(q, tokens, vocab_size, with_replacement):
                found[parent] = Drawn(tokens, q.token_ids, tuple(normalised(q)))
    return found


def _is_sound(q: SparseDistribution, tokens: Sequence[int], vocab_size: int, with_replacement: bool) -> bool:
    is_possible = with_replacement or len(set(tokens)) == len(tokens)
    return is_possible and all(can_have_drawn(q, token, vocab_size) for token in tokens)


def trial_uniforms(num_trials: int, seed: int, num_committed: int, depth: int) -> list[float]:
    """The uniform number of each trial at this depth. A walk visits one place per depth, so no number is used twice."""
    position = num_committed + depth
    return [noise.uniform(seed, position, noise.row_of(depth, trial), Purpose.ACCEPT) for trial in range(num_trials)]


def first_passing(chances: Sequence[float], uniforms: Sequence[float]) -> int | None:
    """Index of the first trial that passes, or None."""
    return next((trial for trial, (h, u) in enumerate(zip(chances, uniforms, strict=True)) if u < h), None)
