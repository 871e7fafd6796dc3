"""A vertical cascade: prompt lookup guesses for the draft, as the draft guesses for the target.

A pass of the draft computes, beyond the chosen nodes, rows for a few tokens that followed the same words earlier in the
text. If the draft's own candidates agree with them, one pass adds several nodes in a row.

Source: the vertical cascade of Chen et al. 2023 (Cascade Speculative Drafting, arXiv 2312.11462), with prompt lookup as
the last, model-free drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.proposer.proposer import Proposals, Proposer
from workers.proposer.text_index import TextIndex
from workers.sampling import DraftRow


class Cascade:
    """Adds a few looked-up tokens to the rows of another proposer."""

    def __init__(self, proposer: Proposer, num_tokens: int) -> None:
        self._proposer = proposer
        self.num_ahead = num_tokens

    def ahead(self, index: TextIndex, text: Sequence[int], path: Sequence[int], most: int) -> Sequence[int]:
        """The tokens that followed the last occurrence of the last tokens of `text` and `path`; as `Proposer.ahead`."""
        index.follow(text)
        return index.after(text, path, most)

    def propose(self, logits: Tensor, rows: Sequence[Sequence[DraftRow]]) -> Proposals:
        return self._proposer.propose(logits, rows)
