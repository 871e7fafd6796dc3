"""What the best block of each size gains, where all texts are alike.

Knows ranks and their chances; must not know tokens, models or time. Best-first: a node is worth the chance that it is
reached, and is never likelier than its parent, so taking the likeliest next is optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def best_reach(heads: Sequence[float], tail: Sequence[float], num_nodes: int) -> list[float]:
    """Chances of the `num_nodes` likeliest nodes to be accepted, falling: their sum is the tokens that they gain.

    `heads`: by depth, of a first candidate where those before it are accepted; there is nothing below the last.
    `tail`: if it is not the first, of the second, the third and so on.
    """
    found: list[float] = []
    heap = [(-heads[0], 1, 0, 1.0)]
    while heap and len(found) < num_nodes and heap[0][0] < 0:
        chance, depth, rank, above = heappop(heap)
        found.append(-chance)
        head = heads[depth - 1]
        if rank < len(tail):
            heappush(heap, (-above * min(head, (1.0 - head) * tail[rank]), depth, rank + 1, above))
        if depth < len(heads):
            heappush(heap, (chance * heads[depth], depth + 1, 0, -chance))
    return found
