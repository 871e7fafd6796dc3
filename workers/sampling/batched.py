"""Interface of a batched rule: decides as `Rule.decide` does, for many blocks at once, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from torch import Tensor

from core.rules import Outcome
from core.speculation import TokenTree
from workers.sampling.logits import Row
from workers.step import Readback, Uploads

Outcomes: TypeAlias = Callable[[], list[Outcome]]
"""Returns the outcome of each block. Call it after the readback."""
Decide: TypeAlias = Callable[[Tensor, Readback], Outcomes]
"""(log p [R, V], readback) -> outcomes. Call it after the upload."""
BatchedRule: TypeAlias = Callable[[Sequence[TokenTree], Sequence[Row], int, Uploads], Decide]
"""(blocks, rows, V, uploads) -> `Decide`. `rows` and log p hold each block's root, then its nodes, block by block.

Greedy rows have log p at temperature 1, which need not be normalised, as for `Rule.decide`. A block with a NaN in its
rows has a meaningless outcome, but does not affect other blocks."""


def starts_of(blocks: Sequence[TokenTree]) -> list[int]:
    """Index of the row of each block's root."""
    return list(accumulate((1 + len(block) for block in blocks), initial=0))[:-1]


def of_nodes(values: list[Any], blocks: Sequence[TokenTree]) -> list[list[Any]]:
    """Split `values` by block; each block has the root's value first, then each node's."""
    starts = starts_of(blocks)
    return [values[start : start + 1 + len(block)] for start, block in zip(starts, blocks, strict=True)]


def at_guesses(blocks: Sequence[TokenTree], vocab_size: int, uploads: Uploads) -> Callable[[Tensor], Tensor]:
    """Take from scores [R, V] the score of each node's token in the row of its parent.  # [R]

    -inf at roots and for ids outside the vocabulary.
    """
    index: list[int] = []
    tokens: list[int] = []
    for start, block in zip(starts_of(blocks), blocks, strict=True):
        index += [start, *(start + 1 + parent for parent in block.parents)]
        tokens += [-1, *block.tokens]
    is_token = [0 <= token < vocab_size for token in tokens]
    ids = [token if is_one else 0 for token, is_one in zip(tokens, is_token, strict=True)]
    rows, columns, is_inside = (uploads.add(values) for values in (index, ids, is_token))
    return lambda scores: scores[rows(), columns()].masked_fill(~is_inside(), -math.inf)
