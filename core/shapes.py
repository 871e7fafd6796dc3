"""Which guesses are worth their place: the law of ranks, and what the best block of each size gains by it.

Knows ranks and their chances; must not know tokens, models or time. Best-first: a node is worth the chance that it is
reached, and is never likelier than its parent, so taking the likeliest next is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

Ranks = tuple[float, ...]
"""For each rank, the chance that the target's token is the draft's candidate of that rank."""


@dataclass(frozen=True, slots=True)
class RankLaw:
    """Where among the draft's candidates the target's next token is found, given that the path so far was accepted."""

    chances: tuple[Ranks, ...]
    """By depth below the root, from 1 on; deeper ones are like the last. Each sums to at most 1, likeliest first.

    Where the draft samples, rank 0 is its sample, and there is no other.
    """
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.chances))  # laws are keys, and long

    def __hash__(self) -> int:
        return self._hash

    def at(self, depth: int) -> Ranks:
        """Chances at `depth`, counted from 1."""
        return self.chances[min(depth, len(self.chances)) - 1]

    def chain(self, depth: int) -> FloatArray:
        """Chance of each of `depth` first candidates in a row that it is accepted, with those before it."""
        reach: FloatArray = np.cumprod([self.at(place)[0] for place in range(1, depth + 1)], dtype=np.float64)
        return reach


@lru_cache(maxsize=512)
def best_reach(law: RankLaw, num_nodes: int, max_depth: int) -> FloatArray:
    """Chances of the `num_nodes` likeliest nodes to be accepted, falling: their sum is the tokens that they gain."""
    found: list[float] = []
    heap = [(-law.at(1)[0], 1, 0, 1.0)]
    while heap and len(found) < num_nodes and heap[0][0] < 0:
        chance, depth, rank, above = heappop(heap)
        found.append(-chance)
        siblings = law.at(depth)
        if rank + 1 < len(siblings):
            heappush(heap, (-above * siblings[rank + 1], depth, rank + 1, above))
        if depth < max_depth:
            heappush(heap, (chance * law.at(depth + 1)[0], depth + 1, 0, -chance))
    return np.array(found)
