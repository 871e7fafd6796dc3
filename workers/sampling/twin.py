"""What the batched twin of a rule is: it decides as `Rule.decide` does, for many blocks at once, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from torch import Tensor

from core.rules import Outcome
from core.speculation import TokenTree
from workers.sampling.sampler import Row
from workers.step import Readback, upload

Outcomes: TypeAlias = Callable[[], list[Outcome]]
"""The outcome of each block, when what it depends on has been read back."""
Twin: TypeAlias = Callable[[Sequence[TokenTree], Tensor, Sequence[Row], Readback], Outcomes]
"""(blocks, log p [R, V], rows, readback) -> outcomes. `log_p` and `rows` hold, block after block, the root and then
each node; as for `Rule.decide`, the law is that of temperature 1 where sampling is greedy, and need not be normalised
there. A block with a NaN among its rows has an outcome that means nothing, and spoils no other's."""


def starts_of(blocks: Sequence[TokenTree]) -> list[int]:
    """The row of each block's root."""
    return list(accumulate((1 + len(block) for block in blocks), initial=0))[:-1]


def of_nodes(values: list[Any], blocks: Sequence[TokenTree]) -> list[list[Any]]:
    """One list for each block, of one more value than it has guesses."""
    starts = starts_of(blocks)
    return [values[start : start + 1 + len(block)] for start, block in zip(starts, blocks, strict=True)]


def at_guesses(scores: Tensor, blocks: Sequence[TokenTree]) -> Tensor:
    """What the row of each node's parent has at the node's token; -inf at roots, and for what is no token.  # [R]"""
    vocab_size = scores.shape[1]
    index: list[int] = []
    tokens: list[int] = []
    for start, block in zip(starts_of(blocks), blocks, strict=True):
        index += [start, *(start + 1 + parent for parent in block.parents)]
        tokens += [-1, *block.tokens]
    is_token = [0 <= token < vocab_size for token in tokens]
    ids = [token if is_one else 0 for token, is_one in zip(tokens, is_token, strict=True)]
    found = scores[upload(index, scores.device), upload(ids, scores.device)]
    return found.masked_fill(~upload(is_token, scores.device), -math.inf)
