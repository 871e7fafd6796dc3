"""Input of a forward pass: rows of many sequences, concatenated.

Knows tokens and trees. Must not know models, nor how attention finds its KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.records import Features
from core.speculation import EMPTY_BLOCK, TokenTree
from workers.step.kv_cache import SequenceKV
from workers.step.readers import Span
from workers.step.transfer import upload


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows that one sequence adds in a step: `tokens`, then the nodes of `tree` below the last token.

    The first `num_cached_nodes` nodes of the tree add no rows: earlier steps have written their KV, in this order,
    right after that of the last token. Invariant: `tokens` is empty if there are cached nodes.
    """

    kv: SequenceKV
    tokens: Sequence[int]
    tree: TokenTree = EMPTY_BLOCK
    num_cached_nodes: int = 0
    wants_logits: bool = True
    """False for all but the last chunk of a prefill."""
    wants_all: bool = False
    """Whether the logits of all rows are wanted, including those before the last token."""
    features: Features | None = None
    """The target's, up to the last token, for a head."""
    adapter: int = 0
    """Number of the adapter that the rows are computed with (`workers.runtime.adapters`); 0 for none."""
    source: Sequence[int] = ()
    """All tokens that an encoder reads. They begin the sequence, so the first of `tokens` may be some of them."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.tree.tokens) - self.num_cached_nodes

    @property
    def num_states(self) -> int:
        """Number of states of recurrent layers that the step writes: after the last token, and after each node."""
        return self.num_rows - max(0, len(self.tokens) - 1)

    @property
    def num_wanted(self) -> int:
        """Number of rows whose logits are wanted; they are the last ones."""
        num_left_out = 0 if self.wants_all else max(0, len(self.tokens) - 1)
        return self.num_rows - num_left_out if self.wants_logits else 0

    @property
    def ids(self) -> Sequence[int]:
        """Token id of each row."""
        return self.tokens if not self.tree.tokens else (*self.tokens, *self.tree.tokens[self.num_cached_nodes :])

    @property
    def positions(self) -> Sequence[int]:
        """Position of each row, after the source; a node's is that of the last token plus the node's depth."""
        first = self.kv.num_tokens - self.kv.num_source - self.num_cached_nodes
        root = first + len(self.tokens) - 1
        if not self.tree.tokens:
            return range(first, root + 1)
        return [*range(first, root + 1), *(root + depth for depth in self.tree.depths[self.num_cached_nodes :])]


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one forward pass, in integers only, so that any rank with the same KV blocks can run it.

    With padding it has more rows than its spans, and more wanted rows than the caller asked for.
    """

    ids: list[int]
    positions: list[int]
    wanted: list[int]
    """Rows whose logits are wanted."""
    spans: list[Span]

    @property
    def has_adapters(self) -> bool:
        return any(span.adapter for span in self.spans)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions and wanted rows, as the model takes them.  # [T], [T], [W]"""
        on_host = (torch.from_numpy(np.array(rows, np.int64)) for rows in (self.ids, self.positions, self.wanted))
        ids, positions, wanted = (upload(rows, device) for rows in on_host)
        return ids, positions, wanted


def flatten(batch: Sequence[StepRows]) -> Step:
    """Concatenate the rows of all sequences into one step."""
    ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for item in batch:
        spans.append(Span(item.kv, len(ids), len(item.tokens), item.tree.parents, item.num_cached_nodes, item.adapter))
        ids += item.ids
        positions += item.positions
        wanted += range(len(ids) - item.num_wanted, len(ids))
    return Step(ids, positions, wanted, spans)
