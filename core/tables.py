"""Which answers to prepare where a draft samples: the best outcome table of a budget.

Knows ranks, their chances and numbers of rows; must not know tokens, models or time. Below each outcome grows a chain;
best-first over (outcome, guess below it) by joint chance, within what each pass of the draft may feed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from core.shapes import BoolArray, FloatArray, IntArray, RankLaw
from core.trees import NO_GROWTH, Growth


@dataclass(frozen=True, slots=True)
class TableBudget:
    """How large an outcome table may become."""

    num_nodes: int
    rows_per_pass: int
    """Nodes that may be fed in one pass; those without guesses below them are never fed."""
    depth: int
    """Guesses below an outcome."""
    fanout: int
    """Outcomes at one place."""


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


def outcomes(num_guesses: int, law: RankLaw, fanout: int, *, is_fed: bool = True) -> Outcomes:
    """How the verification of a chain of so many samples can end; `fanout` ways at each place at most.

    A draft has been fed the places of its own chain below which it has guessed: all but the last. Of a chain that it
    did not guess it has been fed none (`is_fed` False).
    """
    chances = np.zeros((num_guesses + 1, law.table.shape[1]))  # [places, ranks], of the token after each place
    chances[:-1, :-1] = law.table[np.minimum(np.arange(num_guesses), len(law.table) - 1), 1:]
    chances[-1, : len(law.bonus)] = law.bonus
    joint = (np.append(1.0, law.chain(num_guesses))[:, None] * chances)[:, :fanout]
    order = np.argsort(-joint, axis=None, kind="stable")[: int((joint > 0).sum())]
    place, rank = np.unravel_index(order, joint.shape)
    return Outcomes(place - 1, rank, joint[place, rank], (place < num_guesses) & is_fed)


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


@lru_cache(maxsize=4096)
def prepared(num_guesses: int, law: RankLaw, budget: TableBudget, *, is_fed: bool = True) -> Prepared:
    """The outcome table for a chain from which the next round gains the most tokens within the budget.

    A guess below an outcome gains the chance of the outcome times that of its path. So unlikely outcomes get shorter
    chains; one that would get none is left out, since it answers nothing.
    """
    ends = _likeliest(outcomes(num_guesses, law, budget.fanout, is_fed=is_fed), budget.rows_per_pass)
    reach = law.chain(budget.depth)
    if not len(ends) or not len(reach):
        return Prepared()
    kept = _cut(ends, reach, _lengths(ends, reach, budget.rows_per_pass), budget.num_nodes)
    chance = ends.chance @ kept
    return Prepared(
        growth=_growth(num_guesses, ends, reach, kept),
        hit_rate=float(chance[0]),
        accepted=float(chance[1:] @ reach),
        block_tokens=float(chance[1:].sum()),
        rows=_rows(ends, kept, is_fed=is_fed),
    )


def _likeliest(ends: Outcomes, num: int) -> Outcomes:
    """Those that can find a row: each takes one in the pass that its place allows."""
    first = np.concatenate([np.flatnonzero(ends.is_fed)[:num], np.flatnonzero(~ends.is_fed)[:num]])
    return ends.pick(np.sort(first))


def _lengths(ends: Outcomes, reach: FloatArray, num_rows: int) -> IntArray:
    """Guesses below each outcome: in each pass those ends of chains are fed whose next guess gains most.

    This is best-first over all passes at once, because nothing gains more than what it grows from.
    """
    is_open, num_places = _open(ends, num_rows)
    lengths = np.zeros(len(ends), np.int64)
    for number in range(len(reach) + 1):
        next_guess = number - ~ends.is_fed
        can = np.flatnonzero(is_open & (lengths == next_guess) & (next_guess < len(reach)))
        gain = ends.chance[can] * reach[next_guess[can]]
        room = num_rows - (num_places if number == 0 else 0)
        best = np.argsort(-gain, kind="stable")[: min(room, int((gain > 0).sum()))]
        lengths[can[best]] += 1
    return lengths


def _open(ends: Outcomes, num_rows: int) -> tuple[BoolArray, int]:
    """Whose place is, or will be, fed; the number of places that the first pass must feed for it."""
    num_ahead = 0
    places: dict[int, None] = {}
    for place, is_fed in zip(ends.place.tolist(), ends.is_fed.tolist(), strict=True):
        if num_ahead + len(places) >= num_rows:
            break
        if is_fed:
            num_ahead += 1
        else:
            places.setdefault(place)
    return ends.is_fed | np.isin(ends.place, list(places)), len(places)


def _cut(ends: Outcomes, reach: FloatArray, lengths: IntArray, num_nodes: int) -> FloatArray:
    """1 for each outcome and guess below it that is among the `num_nodes` that gain most.  # [outcomes, 1 + depth]

    An outcome gains nothing by itself: it and the first guess below it share what that guess gains.
    """
    kept = (np.arange(1 + len(reach)) <= lengths[:, None]) & (lengths[:, None] > 0)
    if kept.sum() > num_nodes:
        pair = ends.chance[:, None] * reach[0] / 2.0
        gain = np.minimum(ends.chance[:, None] * np.append(1.0, reach), pair)
        worst = np.argsort(-np.where(kept, gain, 0.0), axis=None, kind="stable")[num_nodes:]
        kept.flat[worst] = False
        kept[:, 0] &= kept[:, 1]
    return kept.astype(np.float64)


def _rows(ends: Outcomes, kept: FloatArray, *, is_fed: bool) -> tuple[int, ...]:
    """Nodes fed in each pass: those that something grows from, and the places that were not fed yet; of a chain of
    which the draft has been fed nothing, with all above them.
    """
    index, depth = np.nonzero(kept[:, 1:])
    rows = np.bincount(depth + ~ends.is_fed[index], minlength=kept.shape[1])
    places = ends.place[(kept[:, 0] > 0) & ~ends.is_fed]
    if len(places):
        rows[0] += 1 if is_fed else int(places.max()) + 2
    return tuple(map(int, rows))


def _growth(num_guesses: int, ends: Outcomes, reach: FloatArray, kept: FloatArray) -> Growth:
    """The nodes that are kept, likeliest first."""
    index, column = np.nonzero(kept)
    joint = ends.chance[index] * np.append(1.0, reach)[column]
    order = np.lexsort((column, -joint))
    index, column = index[order], column[order]
    number = np.zeros(kept.shape, np.int64)
    number[index, column] = num_guesses + np.arange(len(index))
    is_outcome = column == 0
    parents = np.where(is_outcome, ends.place[index], number[index, column - 1])
    ranks = np.where(is_outcome, ends.rank[index], 0)
    return Growth(tuple(parents.tolist()), tuple(ranks.tolist()))
