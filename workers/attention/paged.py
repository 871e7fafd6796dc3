"""Attention for a GPU that reads KV by block tables: one pass of a kernel, two for trees.

Chains take one causal pass. A node of a tree attends to all KV before the tree, and to its own lineage (its ancestors
and itself). The KV before the tree takes a second pass without a mask; the few rows of the lineage are gathered for
each node. The softmax over both is a softmax over the lineage and one more key, whose value is the output of the second
pass and whose score is that pass's log-sum-exp. A node reads nothing else, so NaN in one sequence does not affect
others.

Knows arithmetic and a step's shape (`workers.step.paged_plan`); must not know tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from workers.step import KVCache, Step, StepPlan, StepShape, Tiling, plan_step, segments_of, upload


@dataclass(frozen=True, slots=True)
class KVReads:
    """Which rows of a step see which KV. Invariant: a segment with rows sees at least one row of KV."""

    starts: Tensor  # [P+1] int32: the rows of segment i are those from starts[i] to starts[i+1]
    lengths: Tensor  # [P] int32: the number of rows of KV that it sees, from the first on
    table: Tensor  # [P, W] int32: the blocks that hold them
    longest: int  # the most rows of any segment


class Kernel:
    """Attention of rows [T, H, D] over pools of blocks [blocks, block_tokens, H_kv, D].

    By FlashAttention-2, as included in torch; not run by any test of this project: plain loops take its place there.
    Undocumented: blocks are a multiple of 256 tokens; with a block table KV must not be split, or rows are left
    unwritten; a row that sees no KV makes it write out of bounds; and the log-sum-exp is [H, T].
    Source: torch 2.13, `mha_varlen_fwd` in flash_api.cpp; pytorch/pytorch#194167, Dao-AILab/flash-attention#2842.
    """

    def causal(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: KVReads, scale: float, window: int | None
    ) -> Tensor:
        """A segment's last row sees all of its KV, the row before it one row less, and so on; each at most the last
        `window` rows. A segment sees at least as many rows of KV as it has rows.  # [T, H, D]"""
        sees = (-1 if window is None else window - 1, 0)
        if window is None and reads.longest == 1:
            sees = (-1, -1)  # the same, and lets it read KV once for all heads that share it
        return self._run(query, keys, values, reads, reads.longest, scale, sees)[0]

    def unmasked(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: KVReads, scale: float
    ) -> tuple[Tensor, Tensor]:
        """A row sees all KV of its segment. The output, and the log-sum-exp of its scores.  # [T, H, D], [T, H]"""
        # With max_q = 1 it packs heads as rows, and the order of the log-sum-exps is wrong.
        output, logarithms = self._run(query, keys, values, reads, max(2, reads.longest), scale, (-1, -1))
        return output, logarithms.transpose(0, 1)

    @staticmethod
    def _run(
        query: Tensor, keys: Tensor, values: Tensor, reads: KVReads, longest: int, scale: float, sees: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        output, logarithms = varlen_attn(
            query,
            keys,
            values,
            cu_seq_q=reads.starts,
            cu_seq_k=reads.starts,  # has to be there; with a block table it is not read
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
    """A step's plan for a kernel that reads KV by block tables."""

    cache: KVCache
    kernel: Kernel
    write_slots: Tensor  # [T]
    chains: KVReads
    prefixes: Tensor | None  # [P] int32: KV that all rows of a segment see; None where no segment is a tree
    lineage: Tensor | None  # [T, A] slots of a node's ancestors and its own; padded with NO_SLOT, as are all other rows
    gather: Callable[[], StepPlan]

    @cached_property
    def gathering(self) -> StepPlan:
        """The gathering plan, for layers that the kernel does not support; made once, when first needed."""
        return self.gather()

    def can_see(self, window: int | None) -> bool:
        """Whether the kernel can compute a layer with this window: in trees windows go by depth, in the kernel by KV
        row."""
        return window is None or self.lineage is None

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """The attention of one layer, whose KV has been written.  # [T, H, D] -> [T, H, D]"""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        key_blocks, value_blocks = (rows.view(-1, self.cache.block_tokens, *rows.shape[1:]) for rows in (keys, values))
        output = self.kernel.causal(query, key_blocks, value_blocks, self.chains, scale, window)
        if self.prefixes is None or self.lineage is None:
            return output
        above = KVReads(self.chains.starts, self.prefixes, self.chains.table, self.chains.longest)
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


def paged_inputs(
    step: Step, cache: KVCache, kernel: Kernel, tiling: Tiling
) -> tuple[Tensor, Tensor, Tensor, PagedPlan]:
    """Ids [T], positions [T], wanted rows [W] and the plan of a step, in its own shape; uploaded in one copy."""
    segments = segments_of(step.spans)
    shape = StepShape.of(cache, step, segments)
    values = upload(shape.fill(cache, step, segments), cache.device)
    return inputs_in_shape(shape, values, cache, kernel, lambda: plan_step(cache, step.spans, len(step.ids), tiling))


def inputs_in_shape(
    shape: StepShape, values: Tensor, cache: KVCache, kernel: Kernel, gather: Callable[[], StepPlan]
) -> tuple[Tensor, Tensor, Tensor, PagedPlan]:
    """The same of the step that `values` hold in this shape."""
    pieces = shape.cut(values)
    ids, positions, wanted = (pieces[name].long() for name in ("ids", "positions", "wanted"))
    plan = PagedPlan(
        cache=cache,
        kernel=kernel,
        write_slots=pieces["write_slots"].long(),
        chains=KVReads(pieces["starts"], pieces["lengths"], pieces["table"], shape.longest),
        prefixes=pieces.get("prefixes"),
        lineage=pieces.get("lineage"),
        gather=gather,
    )
    return ids, positions, wanted, plan


def _with_lineage(
    query: Tensor, above: Tensor, logarithms: Tensor, keys: Tensor, values: Tensor, lineage: Tensor, scale: float
) -> Tensor:
    """Attention of rows to the KV before the tree and to their lineage [T, A]. # [T, H, D]

    `above` [T, H, D] is the output for the KV before the tree, `logarithms` [T, H] its log-sum-exps. A row without
    lineage keeps its output.
    """
    num_rows, num_ancestors = lineage.shape
    slots = lineage.clamp(min=0).flatten()  # padding reads the blank block
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
