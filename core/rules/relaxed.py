"""Relaxed rules by samples: where no child is what the target drew, another that is nearly as good may stand.

What "nearly as good" is, a rule says by the merit of each node (`lenient`, `typical`); this file goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.rules.rule import Float64, Outcome
from core.speculation import ROOT, TokenTree


def verify_relaxed(block: TokenTree, samples: Sequence[int], merits: Sequence[float]) -> Outcome:
    """Take, from the root, the child that equals the target's sample; where none does, that of largest merit above 0.

    `samples` are those of the root's row and of each node's; `merits` are the nodes'. A tie counts as no merit, so that
    the strictest of each rule is the exact one where scores tie, too.
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
    """What the row of each node's parent has at the node's token; -inf for what is no token.  # rows [1 + nodes, V]"""
    return [
        float(rows[parent + 1, token]) if 0 <= token < rows.shape[1] else -np.inf
        for token, parent in zip(block.tokens, block.parents, strict=True)
    ]
