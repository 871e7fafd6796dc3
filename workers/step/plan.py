"""Plan of what one forward pass writes and reads: made once for each step, shared by all layers.

Knows rows, slots, positions and masks; must not know tokens, models or arithmetic. Readers (`workers.step.readers`)
with few rows and KV of similar length share a padded group. A prefill chunk has a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from workers.step.kv_cache import BLANK_BLOCK, SINK_BLOCK, KVCache
from workers.step.masks import Mask, mask_of
from workers.step.readers import Reader, SourceReader, Span, branches_of
from workers.step.transfer import upload

MAX_GROUPED_ROWS = 32
"""A sequence with more rows than this is a prefill chunk, and shares no group with others."""

MIN_BUCKET_TOKENS = 256
"""KV lengths up to this share a group. Above it, lengths in a group differ by less than a factor of two, which bounds
the padding."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes that shapes are rounded up to: the last bits of a row depend on the shape that it is computed in."""

    min_rows: int = 1
    """Smallest number of rows of a matrix product."""
    row_multiple: int = 1
    """The number of rows is a multiple of this."""
    query_rows: int | None = None
    """Rows of one attention product: more rows are cut into tiles of this size, fewer are padded. None: no tiles."""
    kv_tokens: int = 1
    """The number of slots that are read is a multiple of this; if not 1, it is a multiple of the block size."""
    by_branch: bool = False
    """Whether each branch of a tree is read as a chain."""

    def rows(self, count: int) -> int:
        """Number of rows to compute when `count` are wanted."""
        return round_up(max(count, self.min_rows), self.row_multiple)


NO_TILING = Tiling()


@dataclass(slots=True)
class AttentionGroup:
    """B attention products of one shape, computed in one call, with R query rows and L slots each.

    A product is one reader of the group, or one tile of its only reader.
    """

    device: torch.device
    query_rows: torch.Tensor | None  # [B*R] rows of the step; None stands for all rows in order
    stretches: torch.Tensor | slice  # [B*N] or [N] stretches of KV; a slice of slots if they are contiguous
    stretch_tokens: int  # number of slots of each stretch
    mask: Mask
    _biases: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _by_distance: dict[int, torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask's `bias`, computed once for each kind of layer."""
        key = (window, heads_per_row, dtype)
        if key not in self._biases:
            self._biases[key] = self.mask.bias(window, heads_per_row, dtype, self.device)
        return self._biases[key]

    def bias_by_distance(self, window: int | None, table: torch.Tensor) -> torch.Tensor:
        """The mask's `bias`, plus each head's bias for the distance between row and slot; the table's last for any
        further. Computed once for all layers that share the table.  # table: [H, D] -> [B, H, R, L]
        """
        if id(table) not in self._by_distance:
            distances = upload(self.mask.distances().clip(0, table.shape[1] - 1), self.device)
            self._by_distance[id(table)] = table[:, distances].transpose(0, 1) + self.bias(window, 1, table.dtype)
        return self._by_distance[id(table)]


@dataclass(frozen=True, slots=True)
class Reads:
    """Stretches of KV that the rows of a step read in one attention call."""

    groups: tuple[AttentionGroup, ...]
    row_order: torch.Tensor | None  # [T] rows of the groups' joined outputs; None when they are in order


@dataclass(frozen=True)
class StepPlan:
    """The slots that the rows of a step are written to, and those that each of them reads."""

    cache: KVCache
    write_slots: torch.Tensor  # [T]
    reads: Reads
    spans: Sequence[Span]
    num_rows: int
    tiling: Tiling

    @cached_property
    def source_reads(self) -> Reads:
        """Stretches that cross-attention reads; made when first needed."""
        return _plan_reads(self.cache, [SourceReader(span) for span in self.spans], self.num_rows, self.tiling)


def plan_step(cache: KVCache, spans: Sequence[Span], num_rows: int, tiling: Tiling) -> StepPlan:
    """Plan a step of `num_rows` rows. Rows outside of all spans are padding, which no row sees."""
    readers = [reader for span in spans for reader in (branches_of(span) if tiling.by_branch else [span])]
    reads = _plan_reads(cache, readers, num_rows, tiling)
    return StepPlan(cache, _write_slots(cache, spans, num_rows), reads, spans, num_rows, tiling)


def _plan_reads(cache: KVCache, readers: Sequence[Reader], num_rows: int, tiling: Tiling) -> Reads:
    groups: list[AttentionGroup] = []
    padded: list[tuple[Reader, int]] = []
    for members in _members_of_groups(readers, tiling.query_rows or MAX_GROUPED_ROWS):
        is_in_place = len(readers) == 1 and tiling.query_rows is None  # else padding would have tiles of its own
        longest = num_rows if is_in_place else max(reader.num_rows for reader in members)
        num_queries = round_up(longest, tiling.query_rows or 1)
        groups.append(_plan_group(cache, members, num_queries, num_rows, tiling))
        padded += [(reader, num_queries) for reader in members]
    is_in_order = len(groups) == 1 and groups[0].query_rows is None
    row_order = None if is_in_order else upload(_row_order(padded, num_rows), cache.device)
    return Reads(tuple(groups), row_order)


def _row_order(padded: Sequence[tuple[Reader, int]], num_rows: int) -> list[int]:
    """For each row of the step, its index in the outputs of all readers, each padded to its number of queries."""
    order = [0] * num_rows
    offset = 0
    for reader, num_queries in padded:
        for index, row in enumerate(reader.rows, offset):
            order[row] = index
        offset += num_queries
    return order


def _write_slots(cache: KVCache, spans: Sequence[Span], num_rows: int) -> torch.Tensor:
    slots = [SINK_BLOCK * cache.block_tokens] * num_rows
    for span in spans:
        first = span.num_source + span.num_kv - span.num_rows
        slots[span.first_row : span.first_row + span.num_rows] = cache.slots(span.kv, first, first + span.num_rows)
    return upload(slots, cache.device)


def _members_of_groups(readers: Sequence[Reader], most_rows: int) -> list[list[Reader]]:
    """Readers of each group. A reader with more than `most_rows` rows has a group of its own."""
    if len(readers) == 1:
        return [[*readers]]
    groups: dict[tuple[int, int], list[Reader]] = {}
    for index, reader in enumerate(readers):
        alone = index if reader.num_rows > most_rows else -1
        bucket = (max(reader.num_kv, MIN_BUCKET_TOKENS) - 1).bit_length()
        groups.setdefault((alone, bucket), []).append(reader)
    return list(groups.values())


def _plan_group(
    cache: KVCache, members: Sequence[Reader], num_queries: int, num_rows: int, tiling: Tiling
) -> AttentionGroup:
    num_blocks = cache.num_blocks_for(round_up(max(reader.num_kv for reader in members), tiling.kv_tokens))
    rows = [row for reader in members for row in _padded(reader.rows, num_queries, num_rows)]
    stretches, stretch_tokens = _stretches(cache, members, num_blocks)
    return AttentionGroup(
        device=cache.device,
        query_rows=None if rows == list(range(num_rows)) else upload(rows, cache.device),
        stretches=stretches,
        stretch_tokens=stretch_tokens,
        mask=mask_of(members, num_queries, num_blocks * cache.block_tokens, tiling.query_rows or num_queries),
    )


def _padded(rows: Sequence[int], num_queries: int, num_rows: int) -> Sequence[int]:
    """`rows`, padded with the rows that follow in the step; the outputs of padding are dropped."""
    if len(rows) == num_queries:
        return rows
    return [*rows, *(min(rows[-1] + 1 + row, num_rows - 1) for row in range(num_queries - len(rows)))]


def _stretches(cache: KVCache, members: Sequence[Reader], num_blocks: int) -> tuple[torch.Tensor | slice, int]:
    """The slots to read, as a slice if the blocks are contiguous, else a padded index; and the slots of each entry."""
    sources = [reader.stretches(cache) for reader in members]
    stretch_tokens = min(tokens for _, tokens in sources)
    if len(sources) == 1 and stretch_tokens == cache.block_tokens:
        blocks = sources[0][0][:num_blocks]
        if blocks == list(range(blocks[0], blocks[0] + num_blocks)):
            return slice(blocks[0] * cache.block_tokens, (blocks[0] + num_blocks) * cache.block_tokens), stretch_tokens
    length = num_blocks * cache.block_tokens // stretch_tokens
    tables = [split_stretches(entries, tokens // stretch_tokens)[:length] for entries, tokens in sources]
    padded = [table + [BLANK_BLOCK] * (length - len(table)) for table in tables]
    return upload([entry for table in padded for entry in table], cache.device), stretch_tokens


def split_stretches(entries: list[int], parts: int) -> list[int]:
    """Cut each stretch of slots into `parts` shorter ones."""
    return entries if parts == 1 else [entry * parts + part for entry in entries for part in range(parts)]


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
