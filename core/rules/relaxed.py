"""Relaxed verification by samples: if no child is the target's token, a nearly as good child may be accepted.

The rules (`lenient`, `typical`) define "nearly as good" by the merit of each node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.rules.rule import Float64, Outcome
from core.speculation import ROOT, TokenTree


def verify_relaxed(block: TokenTree, samples: Sequence[int], merits: Sequence[float]) -> Outcome:
    """Walk down from the root to the child that equals the target's sample; else to the child of largest merit above 0.

    `samples` has the root's and then each node's; `merits` has each node's. A tie has merit 0, so that each rule at
    its strictest setting equals the exact rule even where scores tie.
    """
    path: list[int] = []
    num_relaxed = 0
    while True:
        node = path[-1] if path else ROOT
        child = block.child(node, samples[node + 1])
        if child is None and (child := _best_below(block, node, merits)) is not None:
            num_relaxed += 1
        if child is None:
            return Outcome(tuple(path), samples[node + 1], num_relaxed, tuple(samples))
        path.append(child)


def _best_below(block: TokenTree, node: int, merits: Sequence[float]) -> int | None:
    passing = [child for child in range(node + 1, len(block)) if block.parents[child] == node and merits[child] > 0.0]
    return max(passing, key=lambda child: merits[child], default=None)


def values_of_guesses(block: TokenTree, rows: Float64) -> list[float]:
    """Value of each node's token in the row of its parent; -inf for ids outside the vocabulary.  # rows [1 + nodes,
    V]"""
    return [
        float(rows[parent + 1, token]) if 0 <= token < rows.shape[1] else -np.inf
        for token, parent in zip(block.tokens, block.parents, strict=True)
    ]
