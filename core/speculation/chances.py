"""The chance that each candidate of the draft is the target's token.

The first candidate's chance comes from its margin, the others' from their shares and from the usual chances by rank.
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
    said: Sequence[Candidates], margins: Sequence[float], rules: Sequence[tuple[TreeSpec, int]]
) -> list[list[float]]:
    """Chances of the candidates that may become nodes, for each place; none is above the first.

    `margins` has one margin per place, `rules` each tree spec with its number of places. A pass computes all places of
    all sessions at once, because a numpy call costs as much for one place as for many.
    """
    if not said:
        return []
    by_rule = np.array(
        [(*rule.calibration, sum(rule.tail), *rule.tail, *_UNKNOWN)[: 3 + MAX_REPORTED] for rule, _ in rules]
    )
    per_place = np.repeat(by_rule, [num for _, num in rules], axis=0)
    clear = np.minimum(np.maximum(margins, MIN_CHANCE), 1.0 - MIN_CHANCE)
    log_odds = np.minimum(np.maximum(np.log(clear / (1.0 - clear)), -MAX_LOGIT), MAX_LOGIT)
    heads = np.minimum(1.0 / (1.0 + np.exp(-(per_place[:, 0] + per_place[:, 1] * log_odds))), MAX_CHANCE)[:, None]
    others = np.minimum((1.0 - heads) * _tails(said, per_place[:, 3:], per_place[:, 2:3]), heads)
    rows = np.concatenate([heads, np.maximum(others, MIN_REPORTED_CHANCE)], axis=1).tolist()
    widths = (num for rule, times in rules for num in repeat(_num_candidates(rule), times))
    return [row[: min(len(each.ranked), num)] for row, each, num in zip(rows, said, widths, strict=True)]


def _num_candidates(rule: TreeSpec) -> int:
    """Largest number of candidates of a place that become nodes: within the fanout, and with a known chance."""
    return min(rule.fanout, MAX_REPORTED, 1 + len(rule.tail))


def _tails(said: Sequence[Candidates], usual: Floats, total: Floats) -> Floats:
    """Chances of the candidates after the first.  # [P, MAX_REPORTED]

    `usual` [P, MAX_REPORTED] has the usual chances by rank, `total` [P, 1] their sum. Each candidate gets a part of the
    sum in proportion to its share and the square root of its usual chance, which predicts the demo target's token well,
    greedy and sampled (docs/adr/rules).
    """
    shares = chain.from_iterable((*each.shares[1:], *_UNKNOWN)[:MAX_REPORTED] for each in said)
    weights = np.fromiter(shares, float, usual.size).reshape(usual.shape) * np.sqrt(usual)
    sums = weights.sum(axis=1, keepdims=True)
    found: Floats = np.where(sums > 0.0, weights * (total / np.maximum(sums, _TINY)), usual)
    return found


def fixed_shape(rule: TreeSpec, num_nodes: int) -> Part:
    """The likeliest nodes if chances are the same at each place: parents, and path probabilities in falling order."""
    first = Candidates(tuple(range(MAX_REPORTED)))
    (chances,) = chances_of([first], [PRIOR], [(rule, 1)])
    reached, parents = list[float](), list[int]()
    heap = [(-chance, 1, ROOT) for chance in chances]
    while heap and len(reached) < num_nodes:
        path_prob, depth, parent = heappop(heap)
        if depth < rule.max_depth:
            for chance in chances:
                heappush(heap, (path_prob * chance, depth + 1, len(reached)))
        reached.append(-path_prob)
        parents.append(parent)
    return Part((), reached, parents)
