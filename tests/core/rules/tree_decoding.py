"""Decoding by trees of draws, for many seeds: `decoding`, where each place of a block has several draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from core.noise import Purpose, row_of
from core.rules.drawn_trees import verify_drawn
from core.rules.recursive_rejection import judge_recursively
from core.rules.sequential_selection import judge_in_sequence
from core.speculation.token_tree import ROOT, TokenTree
from tests.core.rules.decoding import VOCAB_SIZE, Decoder, log

MOST_DRAWS = 4


def cached(judge):
    """The same, each p and each set of draws once."""

    @cache
    def judged(bits, drawn):
        return judge(np.frombuffer(bits), drawn)

    return lambda p, drawn: judged(p.tobytes(), drawn)


def verifying(judge, *, with_replacement):
    """Return the `verify` function that `Decoder.decode` takes."""
    fast = cached(judge)
    return lambda block, p, seed, num_committed: verify_drawn(
        block, p, seed, num_committed, fast, with_replacement=with_replacement
    )


RECURSIVE = verifying(judge_recursively, with_replacement=False)
SEQUENTIAL = verifying(judge_in_sequence, with_replacement=True)


@dataclass
class TreeDecoder(Decoder):
    """Its blocks are trees: `fanouts[d]` draws at each place d below the root."""

    fanouts: tuple[int, ...] = (3, 2)
    with_replacement: bool = False
    keep_place: Callable[[int, tuple[int, ...]], bool] = lambda last, draws: True
    """Whether what was drawn at a place is sent."""
    keep_row: Callable[[int, int], bool] = lambda last, token: True
    """Whether a draw has a node. Its first draw has one in any case: else nothing would tell of the place."""
    told: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda draws: draws
    """The draft's report of its draws."""
    number: Callable[[int, int], int] = lambda place, draw: MOST_DRAWS * place + draw
    """Row of a draw's noise."""
    _orders: dict = field(default_factory=dict)
    _rows: dict = field(default_factory=dict)
    _laws: dict = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        self.num_possible = (self.q > 0).sum(axis=1).tolist()

    def rows_of(self, depth, place):
        """Where the noise of a place's draws is."""
        if (depth, place) not in self._rows:
            self._rows[depth, place] = [row_of(depth, self.number(place, draw)) for draw in range(self.fanouts[depth])]
        return self._rows[depth, place]

    def law_of(self, before, draws):
        """The draft's report of a place."""
        if (before, draws) not in self._laws:
            self._laws[before, draws] = replace(self.q_records[before], draws=self.told(draws))
        return self._laws[before, draws]

    def draws(self, seed, position, depth, place, last):
        rows = self.rows_of(depth, place)
        if self.with_replacement:
            return tuple(self.guess(seed, position, row, Purpose.DRAFT, last) for row in rows)
        if (position, rows[0]) not in self._orders:
            gumbel = self.noise.gumbel_of_all(*self.noise.remap(position, rows[0], Purpose.DRAFT))
            scores = [gumbel + row.astype(np.float32) for row in log(self.q)]
            self._orders[position, rows[0]] = np.stack([(-each).argsort(axis=1) for each in scores], axis=1).tolist()
        return tuple(self._orders[position, rows[0]][seed][last][: min(len(rows), self.num_possible[last])])

    def chain(self, seed, position, last, purpose=Purpose.DRAFT):
        """The tree, whatever its name says."""
        tokens, parents, laws = [], [], []
        places = [(ROOT, 0, 0, last)]
        for node, depth, place, before in places:
            draws = self.draws(seed, position + depth, depth, place, before)
            if not self.keep_place(before, draws):
                continue
            law = self.law_of(before, draws)
            for rank, token in enumerate(dict.fromkeys(law.draws)):
                if rank and not self.keep_row(before, token):
                    continue
                if depth + 1 < len(self.fanouts):
                    places.append((len(tokens), depth + 1, 1 + VOCAB_SIZE * place + rank, token))
                tokens.append(token)
                parents.append(node)
                laws.append(law)
        return TokenTree(tuple(tokens), tuple(parents), tuple(laws))
