"""What the batched twin of a rule is: it decides as `Rule.decide` does, for many blocks at once, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

from torch import Tensor

from core.rules import Outcome
from core.speculation import TokenTree
from workers.sampling.sampler import Row
from workers.step import Readback

Outcomes: TypeAlias = Callable[[], list[Outcome]]
"""The outcome of each block, when what it depends on has been read back."""
Twin: TypeAlias = Callable[[Sequence[TokenTree], Tensor, Sequence[Row], Readback], Outcomes]
"""(blocks, log p [R, V], rows, readback) -> outcomes. `log_p` and `rows` hold, block after block, the root and then
each node; as for `Rule.decide`, the law is that of temperature 1 where sampling is greedy, and need not be normalised
there. A block with a NaN among its rows has an outcome that means nothing, and spoils no other's."""


def starts_of(blocks: Sequence[TokenTree]) -> list[int]:
    """The row of each block's root."""
    return list(accumulate((1 + len(block) for block in blocks), initial=0))[:-1]
