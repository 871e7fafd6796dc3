"""The tokens of the columns of a draft's scores: all token ids, or those that a head can guess.

Knows token ids; must not know models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The token of each column."""

    size: int
    """Number of all token ids."""
    token_ids: Tensor | None = None
    """None if they are all token ids in order.  # [columns]"""

    @property
    def num_columns(self) -> int:
        return self.size if self.token_ids is None else len(self.token_ids)

    def ids_of(self, columns: Tensor) -> Tensor:
        return columns if self.token_ids is None else self.token_ids[columns]

    def spread(self, scores: Tensor) -> Tensor:
        """Scores of all tokens; -inf for those without a column.  # [R, columns] -> [R, V]"""
        if self.token_ids is None:
            return scores
        return scores.new_full((len(scores), self.size), -torch.inf).index_copy_(1, self.token_ids, scores)
