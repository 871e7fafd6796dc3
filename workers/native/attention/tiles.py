"""Several queries over the same keys or values: four, two and one at a time, over a stretch of rows at a time.

Numba compiles this file at its first import, and keeps the code. Knows addresses; must not know rows of a step.
"""

from __future__ import annotations

from typing import Final

from workers.native.attention.reads import (
    scores_of_four,
    scores_of_one,
    scores_of_two,
    weigh_for_four,
    weigh_for_one,
    weigh_for_two,
)
from workers.native.compiler import compiled
from workers.native.vectors import HAS_PAIRS

MADE_OF: Final = "d2a5bd66d6310428"
"""Digest of the files that this one compiles in (see `machine`)."""
STRETCH: Final = 128
"""Keys, or values, that all of these queries read before the next ones: they stay in the processor's first cache."""


@compiled("void(int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)")
def score(
    num: int, queries: int, query_bytes: int, offsets: int, count: int, keys: int, width: int, is_short: bool,
    out: int, out_bytes: int,
) -> None:  # fmt: skip
    """Products of `num` queries with keys. Three are computed as four: there is room for all `QUERIES`."""
    for begin in range(0, count, STRETCH):
        part, at, first = min(STRETCH, count - begin), offsets + 8 * begin, 0
        while first < num:
            asked, found = queries + first * query_bytes, out + first * out_bytes + 4 * begin
            if num - first > 2:
                scores_of_four(asked, query_bytes, at, part, keys, width, is_short, found, out_bytes)
                first += 4
            elif num - first == 2:
                scores_of_two(asked, query_bytes, at, part, keys, width, is_short, found, out_bytes)
                first += 2
            else:
                scores_of_one(asked, query_bytes, at, part, keys, width, is_short, found, out_bytes)
                first += 1


@compiled("void(int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)")
def weigh(
    num: int, weights: int, weight_bytes: int, offsets: int, count: int, values: int, width: int, is_short: bool,
    out: int, out_bytes: int,
) -> None:  # fmt: skip
    """Add values, each times its weight, to the outputs of `num` queries. Three are computed as four."""
    item = 2 if is_short and HAS_PAIRS else 4
    for begin in range(0, count, STRETCH):
        part, at, first = min(STRETCH, count - begin), offsets + 8 * begin, 0
        while first < num:
            given, to = weights + first * weight_bytes + item * begin, out + first * out_bytes
            if num - first > 2:
                weigh_for_four(given, weight_bytes, at, part, values, width, is_short, to, out_bytes)
                first += 4
            elif num - first == 2:
                weigh_for_two(given, weight_bytes, at, part, values, width, is_short, to, out_bytes)
                first += 2
            else:
                weigh_for_one(given, weight_bytes, at, part, values, width, is_short, to, out_bytes)
                first += 1
