"""Several continuations of one text as a tree of guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.speculation import ROOT, Guesses

MAX_NODES = 32
"""More than a block has room for, with the default settings."""


def tree_of(continuations: Iterable[tuple[int, Sequence[int]]]) -> Guesses:
    """Each is the length of the match that it rests on, and tokens; the first count where there are too many nodes.

    A node's chance is its share of the continuations that go on at its parent.
    """
    nodes: dict[tuple[int, int], int] = {}
    matches, counts, num_going_on = list[int](), list[int](), [0] * (MAX_NODES + 1)
    for match, tokens in continuations:
        parent = ROOT
        for depth, token in enumerate(tokens):
            node = nodes.get((parent, token))
            if node is None:
                if len(nodes) == MAX_NODES:
                    break
                node = nodes[parent, token] = len(nodes)
                matches.append(match + depth)
                counts.append(0)
            counts[node] += 1
            num_going_on[parent] += 1
            parent = node
    parents = tuple([parent for parent, _ in nodes])
    chances = tuple([count / num_going_on[parent] for count, parent in zip(counts, parents, strict=True)])
    return Guesses(parents, tuple([token for _, token in nodes]), chances, tuple(matches))
