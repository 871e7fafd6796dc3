"""Several continuations of one text as a tree of guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.speculation import ROOT, Guesses

MAX_NODES = 32
"""More than a block has room for, with the default settings."""


def tree_of(continuations: Iterable[Sequence[int]], max_nodes: int = MAX_NODES) -> Guesses:
    """The first count where there are too many nodes.

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
