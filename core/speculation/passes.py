"""One pass of the draft model over the trees of several sessions: which nodes it feeds, and what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice

from core.speculation.candidates import Candidates
from core.speculation.chances import chances_of
from core.speculation.tree_builder import TreeBuilder


def feed_likeliest(
    builders: Sequence[TreeBuilder], num_rows: int, rooms: Sequence[int] | None = None, min_path_prob: float = 0.0
) -> None:
    """Choose the likeliest nodes over all sessions for feeding, at most `num_rows`, and of each session as many as its
    number in `rooms`. Ties go to the first session."""
    heap = [(-builder.best_path_prob, index) for index, builder in enumerate(builders) if builder.best_path_prob]
    heapify(heap)
    for _ in range(num_rows):
        if not heap or -heap[0][0] < min_path_prob:
            return
        index = heap[0][1]
        builders[index].feed()
        has_room = rooms is None or len(builders[index].feeding) < rooms[index]
        if has_room and (following := builders[index].best_path_prob):
            heapreplace(heap, (-following, index))
        else:
            heappop(heap)


def add_candidates(builders: Sequence[TreeBuilder], candidates: Sequence[Sequence[Candidates]]) -> None:
    """Add the model's candidates after the nodes being fed, for several sessions."""
    margins = [[each.margin for each in of_session] for of_session in candidates]
    tree_specs = [
        (builder.tree_spec, len(of_session)) for builder, of_session in zip(builders, candidates, strict=True)
    ]
    chances = iter(chances_of(list(chain.from_iterable(candidates)), list(chain.from_iterable(margins)), tree_specs))
    for builder, of_session, known in zip(builders, candidates, margins, strict=True):
        builder.extend(of_session, known, islice(chances, len(of_session)))
