"""Which answers to prepare: the best outcome table of a budget.

Knows ranks, their chances and numbers of rows; must not know tokens, models or time. Best-first over (outcome, guess
below it) by joint chance, within what each pass of the draft may feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from core.shapes import BestTree, BoolArray, FloatArray, IntArray, RankLaw, best_tree
from core.trees import NO_GROWTH, ROOT, Growth, depths


@dataclass(frozen=True, slots=True)
class TableBudget:
    """How large an outcome table may become."""

    num_nodes: int
    num_passes: int
    """Draft passes; one is lost below a place that the draft has not been fed yet."""
    rows_per_pass: int
    """Nodes that may be fed in one pass; those without guesses below them are never fed."""
    max_depth: int
    """Of the blocks below the outcomes."""
    block_nodes: int
    """Nodes of each of these blocks."""
    fanout: int
    """Outcomes at one place."""
    is_chain: bool = False
    """Only chains below the outcomes."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The ways in which a verification may end, likeliest first."""

    place: IntArray
    """Where the accepted path ends: a node of the block, or ROOT."""
    rank: IntArray
    """Of the next token, among the candidates that the block does not guess there."""
    chance: FloatArray
    is_fed: BoolArray
    """Whether the draft knows its candidates at the place already; they are one pass away if not."""

    def __len__(self) -> int:
        return len(self.place)

    def pick(self, indices: IntArray) -> Outcomes:
        return Outcomes(self.place[indices], self.rank[indices], self.chance[indices], self.is_fed[indices])


def outcomes(
    parents: Sequence[int], ranks: Sequence[int], law: RankLaw, fanout: int, *, is_fed: bool = True
) -> Outcomes:
    """How the verification of a block can end; `fanout` ways at each place at most.

    A draft has been fed the places of its own block below which it has guessed: all but the leaves. Of a block that it
    did not guess it has been fed none (`is_fed` False).
    """
    deep = np.array((0, *depths(parents)), dtype=np.int64)
    chances = law.table[np.minimum(deep, len(law.table) - 1)]  # [places, ranks], of the token after each place
    above, own = np.array(parents, np.int64) + 1, np.array(ranks, np.int64)
    is_known = own < chances.shape[1]
    taken = np.zeros(chances.shape, dtype=np.bool_)
    taken[above[is_known], own[is_known]] = True
    reach = np.ones(len(deep))
    for node, (parent, rank) in enumerate(zip(above.tolist(), own.tolist(), strict=True), start=1):
        reach[node] = reach[parent] * (chances[parent, rank] if rank < chances.shape[1] else 0.0)
    has_children = np.isin(np.arange(len(deep)), above)
    if law.is_sampled:
        chances = np.where(has_children[:, None], chances, np.resize(law.bonus, chances.shape[1]))
    free = np.arange(chances.shape[1]) - np.cumsum(taken, axis=1)  # ranks among those that are not taken
    joint = np.where(taken | (free >= fanout), 0.0, reach[:, None] * chances)
    order = np.argsort(-joint, axis=None, kind="stable")[: int((joint > 0).sum())]
    place, column = np.unravel_index(order, joint.shape)
    return Outcomes(place - 1, free[place, column], joint[place, column], has_children[place] & is_fed)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An outcome table, and what is expected of it."""

    growth: Growth = NO_GROWTH
    hit_rate: float = 0.0
    """Chance that it holds the next block."""
    accepted: float = 0.0
    """Guesses of the next block that will be accepted; a miss counts as none."""
    block_tokens: float = 0.0
    """Nodes of the next block; a miss counts as none."""
    rows: tuple[int, ...] = ()
    """Nodes fed in each pass of the draft."""


def best_table(parents: tuple[int, ...], ranks: tuple[int, ...], law: RankLaw, budget: TableBudget) -> Growth:
    """The outcome table for a block from which the next round gains the most tokens within the budget.

    A guess below an outcome gains the chance of the outcome times that of its path. So unlikely outcomes get smaller
    blocks; one that would get none is left out, since it answers nothing.
    """
    return prepared(parents, ranks, law, budget).growth


@lru_cache(maxsize=4096)
def prepared(
    parents: tuple[int, ...], ranks: tuple[int, ...], law: RankLaw, budget: TableBudget, *, is_fed: bool = True
) -> Prepared:
    """`best_table`, with what is expected of it."""
    ends = outcomes(parents, ranks, law, budget.fanout, is_fed=is_fed)
    tree = best_tree(law, budget.block_nodes, budget.max_depth, is_chain=budget.is_chain)
    if not len(ends) or not len(tree):
        return Prepared()
    ends = _likeliest(ends, budget.rows_per_pass)
    kept = _cut(ends, tree, _fed(ends, tree, budget), budget.num_nodes)
    chance = ends.chance @ kept
    return Prepared(
        growth=_growth(len(parents), ends, tree, kept),
        hit_rate=float(chance[0]),
        accepted=float(chance[1:] @ tree.reach),
        block_tokens=float(chance[1:].sum()),
        rows=_rows(ends, tree, kept, budget.num_passes, None if is_fed else parents),
    )


def _likeliest(ends: Outcomes, num: int) -> Outcomes:
    """Those that can find a row: each takes one in the pass that its place allows."""
    first = np.concatenate([np.flatnonzero(ends.is_fed)[:num], np.flatnonzero(~ends.is_fed)[:num]])
    return ends.pick(np.sort(first))


def _fed(ends: Outcomes, tree: BestTree, budget: TableBudget) -> BoolArray:
    """[outcomes, 1 + nodes]: whether the outcome, and each node of the best tree below it, is to be fed.

    In each pass it is what gains most among what the passes before it have grown.

    This is best-first over all passes at once, because nothing gains more than what it grows from.
    """
    gain = ends.chance[:, None] * tree.best_child
    if budget.num_passes < 2:
        gain[~ends.is_fed] = 0.0  # nothing could grow there in time
    step = tree.depths + ~ends.is_fed[:, None]
    fed, is_open = np.zeros(gain.shape, np.bool_), np.zeros(gain.shape, np.bool_)
    num_places = _open_outcomes(ends, gain[:, 0], is_open[:, 0], budget.rows_per_pass)
    for number in range(budget.num_passes):
        room = budget.rows_per_pass - (num_places if number == 0 else 0)
        candidates = np.flatnonzero((step == number) & is_open & (gain > 0))
        best = candidates[np.argsort(-gain.ravel()[candidates], kind="stable")[:room]]
        fed.flat[best] = True
        is_open[:, 1:] = fed[:, tree.parents + 1]
    return fed


def _open_outcomes(ends: Outcomes, gain: FloatArray, is_open: BoolArray, num_rows: int) -> int:
    """Mark whose place is, or will be, fed; the number of places that the first pass must feed for it."""
    is_open |= ends.is_fed
    num_ahead = 0
    places: dict[int, None] = {}
    for index in np.argsort(-gain, kind="stable").tolist():
        if num_ahead + len(places) >= num_rows:
            break
        if ends.is_fed[index]:
            num_ahead += 1
        else:
            places.setdefault(int(ends.place[index]))
    is_open |= np.isin(ends.place, list(places))
    return len(places)


def _cut(ends: Outcomes, tree: BestTree, fed: BoolArray, num_nodes: int) -> FloatArray:
    """1 for each node that grows from what is fed and is among the `num_nodes` that gain most, 0 for the others.

    An outcome gains nothing by itself: it and the first guess below it share what that guess gains.
    """
    kept = np.concatenate([fed[:, :1], fed[:, tree.parents + 1]], axis=1)
    if kept.sum() > num_nodes:
        pair = ends.chance[:, None] * tree.reach[0] / 2.0
        gain = np.minimum(ends.chance[:, None] * np.concatenate([[1.0], tree.reach]), pair)
        worst = np.argsort(-np.where(kept, gain, 0.0), axis=None, kind="stable")[num_nodes:]
        kept.flat[worst] = False
        kept[:, 0] &= kept[:, 1]
    return kept.astype(np.float64)


def _rows(
    ends: Outcomes, tree: BestTree, kept: FloatArray, num_passes: int, above: Sequence[int] | None
) -> tuple[int, ...]:
    """Nodes fed in each pass: those that something grows from, and the places that were not fed yet.

    `above`: parents in a block of which the draft has been fed nothing, so that each place brings those above it.
    """
    fed = np.zeros(kept.shape, np.bool_)
    index, node = np.nonzero(kept[:, 1:])
    fed[index, tree.parents[node] + 1] = True
    step = tree.depths + ~ends.is_fed[:, None]
    rows = np.bincount(step[fed], minlength=num_passes)
    places = set(ends.place[(kept[:, 0] > 0) & ~ends.is_fed].tolist())
    if above is not None:
        places = _with_ancestors(places, above)
    rows[0] += len(places)
    return tuple(map(int, rows))


def _with_ancestors(places: set[int], parents: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for place in places:
        while place not in found:
            found.add(place)
            place = parents[place] if place != ROOT else ROOT
    return found


def _growth(num_block: int, ends: Outcomes, tree: BestTree, kept: FloatArray) -> Growth:
    """The nodes that are kept, likeliest first."""
    index, column = np.nonzero(kept)
    joint = ends.chance[index] * np.concatenate([[1.0], tree.reach])[column]
    order = np.lexsort((column, -joint))
    index, column = index[order], column[order]
    number = np.zeros(kept.shape, np.int64)
    number[index, column] = num_block + np.arange(len(index))
    is_outcome = column == 0
    above = tree.parents[np.maximum(column - 1, 0)] + 1
    parents = np.where(is_outcome, ends.place[index], number[index, above])
    ranks = np.where(is_outcome, ends.rank[index], tree.ranks[np.maximum(column - 1, 0)])
    return Growth(tuple(parents.tolist()), tuple(ranks.tolist()))
