"""The chance that each candidate of the draft is the target's token.

The first candidate's chance comes from its margin, those of the rest from their shares and the usual chances by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain, repeat

import numpy as np

from core.speculation.calibration import MAX_CHANCE, MAX_LOGIT, MAX_REPORTED, MIN_CHANCE, PRIOR
from core.speculation.candidates import Candidates
from core.speculation.growth import Floats, TreeSpec
from core.speculation.token_tree import ROOT
from core.speculation.tree_nodes import Part

MIN_REPORTED_CHANCE = 1e-9
"""Smallest chance that is sent: it stays above 0 as a 4-byte float on a link."""
_UNKNOWN = (0.0,) * MAX_REPORTED
_TINY = np.finfo(float).tiny


def chances_of(
    candidates: Sequence[Candidates], margins: Sequence[float], tree_specs: Sequence[tuple[TreeSpec, int]]
) -> list[list[float]]:
    """Chances of the candidates that may become nodes, after each node; none is above the first.

    `margins` has one margin per node, `tree_specs` each tree spec with its number of nodes. A pass computes all nodes
    of all sessions at once, because a numpy call costs as much for one node as for many.
    """
    if not candidates:
        return []
    by_spec = np.array(
        [(*spec.calibration, sum(spec.tail), *spec.tail, *_UNKNOWN)[: 3 + MAX_REPORTED] for spec, _ in tree_specs]
    )
    per_node = np.repeat(by_spec, [num for _, num in tree_specs], axis=0)
    clear = np.minimum(np.maximum(margins, MIN_CHANCE), 1.0 - MIN_CHANCE)
    log_odds = np.minimum(np.maximum(np.log(clear / (1.0 - clear)), -MAX_LOGIT), MAX_LOGIT)
    heads = np.minimum(1.0 / (1.0 + np.exp(-(per_node[:, 0] + per_node[:, 1] * log_odds))), MAX_CHANCE)[:, None]
    tails = np.minimum((1.0 - heads) * _tails(candidates, per_node[:, 3:], per_node[:, 2:3]), heads)
    rows = np.concatenate([heads, np.maximum(tails, MIN_REPORTED_CHANCE)], axis=1).tolist()
    widths = (num for spec, times in tree_specs for num in repeat(_num_candidates(spec), times))
    return [row[: min(len(each.ranked), num)] for row, each, num in zip(rows, candidates, widths, strict=True)]


def _num_candidates(tree_spec: TreeSpec) -> int:
    """Largest number of candidates of a node that become nodes: within the fanout, and with a known chance."""
    return min(tree_spec.fanout, MAX_REPORTED, 1 + len(tree_spec.tail))


def _tails(candidates: Sequence[Candidates], usual: Floats, total: Floats) -> Floats:
    """Chances of the candidates after the first.  # [P, MAX_REPORTED]

    `usual` [P, MAX_REPORTED] has the usual chances by rank, `total` [P, 1] their sum. Each candidate gets a part of the
    sum in proportion to its share and the square root of its usual chance, which predicts the demo target's token well,
    greedy and sampled (docs/adr/rules).
    """
    shares = chain.from_iterable((*each.shares[1:], *_UNKNOWN)[:MAX_REPORTED] for each in candidates)
    weights = np.fromiter(shares, float, usual.size).reshape(usual.shape) * np.sqrt(usual)
    sums = weights.sum(axis=1, keepdims=True)
    found: Floats = np.where(sums > 0.0, weights * (total / np.maximum(sums, _TINY)), usual)
    return found


def fixed_shape(tree_spec: TreeSpec, num_nodes: int) -> Part:
    """The likeliest nodes if chances are the same after each node: parents, and path probabilities in falling order."""
    first = Candidates(tuple(range(MAX_REPORTED)))
    (chances,) = chances_of([first], [PRIOR], [(tree_spec, 1)])
    reached, parents = list[float](), list[int]()
    heap = [(-chance, 1, ROOT) for chance in chances]
    while heap and len(reached) < num_nodes:
        path_prob, depth, parent = heappop(heap)
        if depth < tree_spec.max_depth:
            for chance in chances:
                heappush(heap, (path_prob * chance, depth + 1, len(reached)))
        reached.append(-path_prob)
        parents.append(parent)
    return Part((), reached, parents)
