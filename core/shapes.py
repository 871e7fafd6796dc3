"""Which guesses are worth their place: the law of ranks, and the best block of each size by it.

Knows ranks and their chances; must not know tokens, models or time. Best-first: a node is worth the chance that it is
reached, and is never likelier than its parent, so taking the likeliest next is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from core.trees import ROOT, Growth

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

Ranks = tuple[float, ...]
"""For each rank, the chance that the target's token is the draft's candidate of that rank."""


@dataclass(frozen=True, slots=True)
class RankLaw:
    """Where among the draft's candidates the target's next token is found, given that the path so far was accepted."""

    chances: tuple[Ranks, ...]
    """By depth below the root, from 1 on; deeper ones are like the last. Each sums to at most 1, likeliest first.

    Where the draft samples, rank 0 is its sample and the others are what the target may put in its place.
    """
    bonus: Ranks = ()
    """Where the draft samples: the law of the token after a block that was accepted whole, over the draft's candidates.
    Empty where the draft does not sample, and that law is no other than `chances`."""
    table: FloatArray = field(init=False, repr=False, compare=False)
    """`chances` as one array, [depth - 1, rank]."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width = max(map(len, (*self.chances, self.bonus)))
        rows = [[*ranks, *[0.0] * (width - len(ranks))] for ranks in self.chances]
        object.__setattr__(self, "table", np.array(rows))
        object.__setattr__(self, "_hash", hash((self.chances, self.bonus)))  # laws are keys, and long

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_sampled(self) -> bool:
        return bool(self.bonus)

    def at(self, depth: int) -> Ranks:
        """Chances at `depth`, counted from 1."""
        return self.chances[min(depth, len(self.chances)) - 1]


@dataclass(frozen=True, slots=True, eq=False)
class BestTree:
    """Blocks of every size at once: node i is the best to add to the nodes before it."""

    parents: IntArray
    ranks: IntArray
    depths: IntArray
    """Of the root (0), then of each node."""
    reach: FloatArray
    """Chance that the node is accepted. Never rises."""
    best_child: FloatArray
    """Of the root, then of each node: the reach of its likeliest child, 0 where it has none."""
    rows: tuple[int, ...]
    """Nodes that a draft feeds in each pass to grow just this block; the first is the last committed token."""
    tokens: float
    """Guesses that are accepted: the sum of `reach`."""

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def of(cls, parents: IntArray, ranks: IntArray, reach: FloatArray) -> BestTree:
        """With all that follows from shape and chances."""
        deep = np.zeros(len(parents) + 1, dtype=np.int64)
        for node, parent in enumerate(parents.tolist(), start=1):
            deep[node] = deep[parent + 1] + 1
        return cls._with_children(parents, ranks, deep, reach)

    @classmethod
    def _with_children(cls, parents: IntArray, ranks: IntArray, deep: IntArray, reach: FloatArray) -> BestTree:
        best_child = np.zeros(len(parents) + 1)
        np.maximum.at(best_child, parents + 1, reach)
        rows = np.bincount(deep[best_child > 0]) if len(parents) else ()
        return cls(parents, ranks, deep, reach, best_child, tuple(map(int, rows)), float(reach.sum()))

    def prefix(self, num_nodes: int) -> BestTree:
        """The first `num_nodes` nodes: the best block of that size."""
        cut = slice(num_nodes)
        return self._with_children(self.parents[cut], self.ranks[cut], self.depths[: num_nodes + 1], self.reach[cut])

    @property
    def num_branches(self) -> int:
        """Beside the first: 0 for a chain."""
        return len(self) - int((self.best_child > 0).sum())

    @property
    def growth(self) -> Growth:
        """The whole block, to be asked of a draft. Nodes come likeliest first: a prefix is the best of its size."""
        return Growth(tuple(self.parents.tolist()), tuple(self.ranks.tolist()))


@lru_cache(maxsize=4096)
def best_tree(law: RankLaw, num_nodes: int, max_depth: int, *, is_chain: bool = False) -> BestTree:
    """The `num_nodes` nodes that are likeliest to be accepted, likeliest first: their sum is the tokens they gain."""
    if max_depth < 1 or num_nodes < 1:
        return BestTree.of(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return _best_first(law, -(-num_nodes // 32) * 32, max_depth, is_chain or law.is_sampled).prefix(num_nodes)


@lru_cache(maxsize=512)
def _best_first(law: RankLaw, num_nodes: int, max_depth: int, is_chain: bool) -> BestTree:
    """The best nodes, best first."""
    nodes: list[tuple[int, int, float]] = []
    deep = {ROOT: 0}
    heap = [(-law.at(1)[0], 0, ROOT, 0, 1.0)]
    order = count(1)  # among equals, whoever was found first
    while heap and len(nodes) < num_nodes and heap[0][0] < 0:
        chance, _, parent, rank, above = heappop(heap)
        node = len(nodes)
        nodes.append((parent, rank, -chance))
        deep[node] = deep[parent] + 1
        siblings = law.at(deep[node])
        if not is_chain and rank + 1 < len(siblings):
            heappush(heap, (-above * siblings[rank + 1], next(order), parent, rank + 1, above))
        if deep[node] < max_depth:
            heappush(heap, (chance * law.at(deep[node] + 1)[0], next(order), node, 0, -chance))
    parents, ranks, reach = zip(*nodes, strict=True) if nodes else ((), (), ())
    return BestTree.of(np.array(parents, np.int64), np.array(ranks, np.int64), np.array(reach))


def best_block(law: RankLaw, num_nodes: int, max_depth: int, *, is_chain: bool = False) -> Growth:
    """The block of up to `num_nodes` nodes of which the target accepts the most; a chain where drafts sample."""
    return best_tree(law, num_nodes, max_depth, is_chain=is_chain).growth
