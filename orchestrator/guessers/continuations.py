"""Several continuations of one text as a tree of guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.speculation import ROOT, Guesses

MAX_NODES = 32
"""Maximum number of nodes: that of a block with the default settings (`max_block_tokens`)."""


def tree_of(continuations: Iterable[Sequence[int]], max_nodes: int = MAX_NODES) -> Guesses:
    """Merge continuations into a tree. If there are too many nodes, the first ones are kept.

    A node's chance is its share of the continuations that go on at its parent.
    """
    nodes: dict[tuple[int, int], int] = {}
    counts, num_going_on = list[int](), [0] * (max_nodes + 1)
    for tokens in continuations:
        parent = ROOT
        for token in tokens:
            node = nodes.get((parent, token))
            if node is None:
                if len(nodes) == max_nodes:
                    break
                node = nodes[parent, token] = len(nodes)
                counts.append(0)
            counts[node] += 1
            num_going_on[parent] += 1
            parent = node
    parents = tuple([parent for parent, _ in nodes])
    chances = tuple([count / num_going_on[parent] for count, parent in zip(counts, parents, strict=True)])
    return Guesses(parents, tuple([token for _, token in nodes]), chances)
