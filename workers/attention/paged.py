"""Attention that reads KV where it lies, by block tables, for a GPU: one pass of a kernel, two for trees.

Chains are one causal pass. Nodes of a tree see all that is above its first node, and their own lineage besides. The
former is a second pass, without a mask; of the latter there are few rows, which are gathered for each node. A softmax
over both is one over the lineage and one key more: what the pass gave is the value of that key, and the logarithm of
its sum of exponentials is its score. What a node has no part in it does not read, so that a sequence that broke spoils
no other.

Knows arithmetic and a step's form (`workers.step.paged_plan`); must not know tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from workers.step import Form, KVCache, Step, StepPlan, Tiling, parts_of, plan_step, upload


@dataclass(frozen=True, slots=True)
class Reads:
    """Which rows of a step see which KV. Invariant: a part that has rows sees a row of KV at least."""

    starts: Tensor  # [P+1] int32: the rows of part i are those from starts[i] to starts[i+1]
    lengths: Tensor  # [P] int32: it sees the first so many rows of KV
    table: Tensor  # [P, W] int32: in these blocks
    longest: int  # rows that a part may have


class Kernel(Protocol):
    """Attention of rows [T, H, D] over pools of blocks [blocks, block_tokens, H_kv, D]."""

    def causal(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scale: float, window: int | None
    ) -> Tensor:
        """A part's last row sees all of its KV, the one before it a row less, and so on; each at most the last
        `window`. A part sees as many rows of KV as it has rows, at least.  # [T, H, D]"""

    def unmasked(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scale: float
    ) -> tuple[Tensor, Tensor]:
        """A row sees all KV of its part. And the logarithm of its sum of exponentials.  # [T, H, D], [T, H]"""


class Flash:
    """FlashAttention-2, as torch brings it along; not run by any test of this project.

    What its documentation does not say: blocks are a multiple of 256 tokens; with a block table KV must not be split,
    or rows are left unwritten; where rows see no KV at all it writes to a wrong place; and logarithms are [H, T].
    Source: torch 2.13, `mha_varlen_fwd` in flash_api.cpp; pytorch/pytorch#194167, Dao-AILab/flash-attention#2842.
    """

    def causal(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scale: float, window: int | None
    ) -> Tensor:
        sees = (-1 if window is None else window - 1, 0)
        if window is None and reads.longest == 1:
            sees = (-1, -1)  # the same, and lets it read KV once for all heads that share it
        return self._run(query, keys, values, reads, reads.longest, scale, sees)[0]

    def unmasked(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scale: float
    ) -> tuple[Tensor, Tensor]:
        # Told that no part has more than one row it takes heads for rows, and mixes up the logarithms.
        output, logarithms = self._run(query, keys, values, reads, max(2, reads.longest), scale, (-1, -1))
        return output, logarithms.transpose(0, 1)

    @staticmethod
    def _run(
        query: Tensor, keys: Tensor, values: Tensor, reads: Reads, longest: int, scale: float, sees: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        output, logarithms = varlen_attn(
            query,
            keys,
            values,
            cu_seq_q=reads.starts,
            cu_seq_k=reads.starts,  # has to be there; with a block table nobody reads it
            max_q=longest,
            max_k=reads.table.shape[1] * keys.shape[1],  # what lies beyond is not read
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=sees,
            enable_gqa=True,
            seqused_k=reads.lengths,
            block_table=reads.table,
            num_splits=1,
        )
        return output, logarithms


@dataclass(frozen=True)
class PagedPlan:
    """What `StepPlan` says, for a kernel that finds KV by block tables."""

    cache: KVCache
    kernel: Kernel
    write_slots: Tensor  # [T]
    chains: Reads
    prefixes: Tensor | None  # [P] int32: KV that all rows of a part see; None where no part is a tree
    lineage: Tensor | None  # [T, A] slots of a node's ancestors and its own; NOBODY behind them, and in other rows
    gather: Callable[[], StepPlan]

    @cached_property
    def gathering(self) -> StepPlan:
        """The same for layers that ask for what no kernel does; planned once, if there are any."""
        return self.gather()

    def can_see(self, window: int | None) -> bool:
        """Whether a layer with such a window can be computed: a node's ends where its depth says, not its place."""
        return window is None or self.lineage is None

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """The attention of one layer, whose KV has been written.  # [T, H, D] -> [T, H, D]"""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        key_blocks, value_blocks = (rows.view(-1, self.cache.block_tokens, *rows.shape[1:]) for rows in (keys, values))
        output = self.kernel.causal(query, key_blocks, value_blocks, self.chains, scale, window)
        if self.prefixes is None or self.lineage is None:
            return output
        above = Reads(self.chains.starts, self.prefixes, self.chains.table, self.chains.longest)
        of_nodes, logarithms = self.kernel.unmasked(query, key_blocks, value_blocks, above, scale)
        is_node = self.lineage[:, 0] >= 0
        return _with_lineage(
            query,
            torch.where(is_node[:, None, None], of_nodes, output),
            logarithms,
            keys,
            values,
            self.lineage,
            scale,
        )


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What a model is called with."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    wanted: Tensor  # [W]
    plan: PagedPlan

    @classmethod
    def of(
        cls, form: Form, values: Tensor, cache: KVCache, kernel: Kernel, gather: Callable[[], StepPlan]
    ) -> PagedStep:
        """The step that has been written to `values` in this form."""
        pieces = form.cut(values)
        ids, positions, wanted = (pieces[name].long() for name in ("ids", "positions", "wanted"))
        plan = PagedPlan(
            cache=cache,
            kernel=kernel,
            write_slots=pieces["write_slots"].long(),
            chains=Reads(pieces["starts"], pieces["lengths"], pieces["table"], form.longest),
            prefixes=pieces.get("prefixes"),
            lineage=pieces.get("lineage"),
            gather=gather,
        )
        return cls(ids, positions, wanted, plan)

    @classmethod
    def lay_out(cls, step: Step, cache: KVCache, kernel: Kernel, tiling: Tiling) -> PagedStep:
        """The step in a form of its own, which goes to the device in one copy."""
        parts = parts_of(step.spans)
        form = Form.of(cache, step, parts)
        values = upload(form.fill(cache, step, parts), cache.device)
        return cls.of(form, values, cache, kernel, lambda: plan_step(cache, step.spans, len(step.ids), tiling))


def _with_lineage(
    query: Tensor, above: Tensor, logarithms: Tensor, keys: Tensor, values: Tensor, lineage: Tensor, scale: float
) -> Tensor:
    """What rows see, `above` [T, H, D] with its `logarithms` [T, H], and their lineage [T, A].  # [T, H, D]

    A row without lineage keeps what it has: its one key has all the weight.
    """
    num_rows, num_ancestors = lineage.shape
    slots = lineage.clamp(min=0).flatten()  # whoever is nobody is read from the blank block
    own_keys, own_values = (
        rows.index_select(0, slots).view(num_rows, num_ancestors, *rows.shape[1:]).float() for rows in (keys, values)
    )
    queries = query.reshape(num_rows, keys.shape[1], -1, query.shape[2]).float()  # [T, H_kv, G, D]
    scores = torch.einsum("tkgd,takd->tkga", queries, own_keys) * scale
    scores = scores.masked_fill((lineage < 0)[:, None, None], float("-inf"))
    first = logarithms.reshape(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([first, scores], dim=-1), dim=-1)
    seen = above.reshape(*scores.shape[:3], -1).float()
    joined = weights[..., :1] * seen + torch.einsum("tkga,takd->tkgd", weights[..., 1:], own_values)
    return joined.view(above.shape).to(query.dtype)
