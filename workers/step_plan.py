"""What one forward pass writes and reads: planned once for a step, shared by all layers.

Knows rows, slots, positions and masks; must not know tokens, models or arithmetic. Sequences with few rows and KV of
like length go into one padded group; a prefill chunk is a group of its own. A node of a tree sees what was there before
the step, the chain above it, its ancestors and itself; its position is its depth, which sliding windows compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from core.records import ROOT
from workers.kv_cache import BLANK_BLOCK, SINK_BLOCK, KVCache, SequenceKV

MAX_GROUPED_ROWS = 32
"""A sequence with more rows than this is a prefill chunk and is not padded together with others."""

MIN_BUCKET_TOKENS = 256
"""KV lengths up to this share a group; above, a group spans a factor of two, which bounds the padding."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """What shapes are rounded up to: the last bits of a row depend on the shape that it is computed in."""

    min_rows: int = 1
    """Least rows of every matrix product."""
    row_multiple: int = 1
    """And what their number is a multiple of."""
    query_rows: int = 1
    """Rows that a sequence brings to attention are a multiple of this."""
    kv_tokens: int = 1
    """And so are the slots that they read; a multiple of the block size."""

    def rows(self, count: int) -> int:
        """Rows to compute where `count` are wanted."""
        return round_up(max(count, self.min_rows), self.row_multiple)


@dataclass(frozen=True, slots=True)
class Span:
    """The rows that one sequence adds in a step: `num_chain` tokens, then the nodes of a tree below the last one."""

    kv: SequenceKV
    first_row: int
    num_chain: int
    parents: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.num_chain + len(self.parents)

    @property
    def num_kv(self) -> int:
        return self.kv.num_tokens + self.num_rows


@dataclass(slots=True)
class Group:
    """Sequences that share one padded attention product: B of them, with R query rows and L slots each."""

    query_rows: torch.Tensor | None  # [B*R] rows of the step; None stands for all rows in order
    blocks: torch.Tensor | slice  # [B*N] blocks, or the one stretch of slots that holds them all
    visible: torch.Tensor  # [B, R, L]
    query_positions: torch.Tensor  # [B, R]
    key_positions: torch.Tensor  # [B, L]
    _biases: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores, 0 or -inf; made once for each kind of layer.  # [B, 1, R*G, L]"""
        key = (window, heads_per_row, dtype)
        if key not in self._biases:
            self._biases[key] = self._make_bias(window, heads_per_row, dtype)
        return self._biases[key]

    def _make_bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype) -> torch.Tensor:
        visible = self.visible
        if window is not None:
            visible = visible & (self.query_positions[:, :, None] - self.key_positions[:, None, :] < window)
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
        return bias.repeat_interleave(heads_per_row, dim=1)[:, None]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where the rows of a step are written, and what each of them reads."""

    cache: KVCache
    write_slots: torch.Tensor  # [T]
    groups: tuple[Group, ...]
    row_order: torch.Tensor | None  # [T] rows of the groups' joined outputs; None when they are in order


def plan_step(cache: KVCache, spans: Sequence[Span], num_rows: int, tiling: Tiling) -> StepPlan:
    """The plan of a step of `num_rows` rows; those that belong to no span are padding, seen by nobody."""
    order = [0] * num_rows
    groups: list[Group] = []
    offset = 0
    for members in _members_of_groups(spans):
        longest = num_rows if len(spans) == 1 else max(span.num_rows for span in members)
        num_queries = round_up(longest, tiling.query_rows)
        groups.append(_plan_group(cache, members, num_queries, num_rows, tiling))
        for span in members:
            order[span.first_row : span.first_row + span.num_rows] = range(offset, offset + span.num_rows)
            offset += num_queries
    is_in_order = len(groups) == 1 and groups[0].query_rows is None
    row_order = None if is_in_order else torch.tensor(order, device=cache.device)
    return StepPlan(cache, _write_slots(cache, spans, num_rows), tuple(groups), row_order)


def _write_slots(cache: KVCache, spans: Sequence[Span], num_rows: int) -> torch.Tensor:
    slots = [SINK_BLOCK * cache.block_tokens] * num_rows
    for span in spans:
        for row in range(span.num_rows):
            slots[span.first_row + row] = cache.slot(span.kv, span.kv.num_tokens + row)
    return torch.tensor(slots, device=cache.device)


def _members_of_groups(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that are padded together; a long one stays alone."""
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        alone = span.first_row if span.num_rows > MAX_GROUPED_ROWS else -1
        bucket = (max(span.num_kv, MIN_BUCKET_TOKENS) - 1).bit_length()
        groups.setdefault((alone, bucket), []).append(span)
    return list(groups.values())


def _plan_group(cache: KVCache, members: Sequence[Span], num_queries: int, num_rows: int, tiling: Tiling) -> Group:
    num_blocks = cache.num_blocks_for(round_up(max(span.num_kv for span in members), tiling.kv_tokens))
    rows = [min(span.first_row + row, num_rows - 1) for span in members for row in range(num_queries)]
    seen = [_visibility(span, num_queries, num_blocks * cache.block_tokens) for span in members]
    visible, query_positions, key_positions = (torch.stack(parts).to(cache.device) for parts in zip(*seen, strict=True))
    return Group(
        query_rows=None if rows == list(range(num_rows)) else torch.tensor(rows, device=cache.device),
        blocks=_blocks(cache, members, num_blocks),
        visible=visible,
        query_positions=query_positions,
        key_positions=key_positions,
    )


def _blocks(cache: KVCache, members: Sequence[Span], num_blocks: int) -> torch.Tensor | slice:
    """A sequence whose blocks adjoin is read in place; others are gathered, padded with the blank block."""
    tables = [span.kv.blocks[:num_blocks] for span in members]
    first = tables[0][0]
    if len(tables) == 1 and tables[0] == list(range(first, first + num_blocks)):
        return slice(first * cache.block_tokens, (first + num_blocks) * cache.block_tokens)
    padded = [table + [BLANK_BLOCK] * (num_blocks - len(table)) for table in tables]
    return torch.tensor(padded, device=cache.device).flatten()


def _visibility(span: Span, num_queries: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which slots each query row sees, and the positions of rows and slots.  # [R, L], [R], [L]

    Rows beyond the span repeat its last one, so that no row sees nothing.
    """
    positions = torch.arange(num_slots)
    rows = torch.arange(num_queries).clamp_(max=span.num_rows - 1) + span.kv.num_tokens
    visible = positions <= rows[:, None]
    if not span.parents:
        return visible, rows, positions
    lineage = _lineage(span.parents)
    root = span.kv.num_tokens + span.num_chain - 1  # slot of the tree's root, which is also its position
    nodes = slice(root + 1, root + 1 + len(span.parents))
    visible[span.num_chain : span.num_rows, nodes] = lineage
    visible[span.num_rows :] = visible[span.num_rows - 1]
    positions[nodes] = root + lineage.sum(dim=1)
    return visible, positions[rows], positions


def _lineage(parents: Sequence[int]) -> torch.Tensor:
    """True where the column is the row's node or one of its ancestors.  # [N, N]"""
    lineage = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            lineage[node] |= lineage[parent]
    return lineage


def round_up(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple
