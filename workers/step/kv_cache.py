"""Keys and values of all sequences in one pool of fixed-size blocks. Rolls back by length, compacts after a tree.

Must not know tokens, positions or models: `num_tokens` counts rows of KV. `workers.step.block_pool` keeps the state of
each block; the engine decides which sequence gives up its blocks when the pool is full.

Sequences share full blocks. The sequence that wrote a block publishes it under the hash of its whole prefix, and a new
sequence adopts the published blocks of its own prefix. Before a sequence writes to a block with other users, it gets a
copy of the block (copy-on-write).

Two blocks belong to no sequence. Block tables are padded with the blank block, which is never written. Padding rows
write to the sink block, so no sequence reads a NaN that a padding row leaves.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch

from core.text import BlockHash
from workers.step.block_pool import BlockPool
from workers.step.kv_dtype import as_bits
from workers.step.states import OutOfBlocks, StateSlots
from workers.step.transfer import upload

__all__ = ["NUM_OWN_BLOCKS", "KVCache", "LayerShape", "OutOfBlocks", "SequenceKV"]

BLANK_BLOCK = 0
"""Padding of block tables; always zeros."""
SINK_BLOCK = 1
"""Padding rows write to it; never read."""
NUM_OWN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and dimensions of the keys and values that one layer stores for one token; zeros without attention."""

    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    values_in_keys: bool = False
    """Whether a value is the first `value_dim` numbers of its key, and takes no memory of its own."""

    @property
    def num_stored(self) -> int:
        """Numbers that one token takes."""
        return self.num_kv_heads * (self.key_dim + (0 if self.values_in_keys else self.value_dim))


@dataclass(eq=False, slots=True)
class SequenceKV:
    """Blocks of one sequence, in order; only `KVCache` changes them. Invariant: they hold `num_tokens` rows."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Rows whose KV is valid."""
    num_source: int = 0
    """Number of its first rows that hold keys and values of an encoder's output, which only cross-attention reads."""
    may_hold_nan: bool = False
    """Whether NaN may be in blocks that it released. Then each of its new blocks is erased, its own old ones too."""
    num_rowless: int = 0
    """Heads with KV: number of first tokens that have no row, because no feature before them is known. The row of the
    next one is the first that is stored."""
    states: dict[int, int] = field(default_factory=dict)
    """Recurrent layers: slot of the state after a number of rows. In a tree, a row's state follows its own branch."""
    spare_states: list[int] = field(default_factory=list)
    """Slots reserved for the next rows."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in fresh pages, which take no memory until they are written."""
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every system has huge pages; KV works without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class KVCache:
    """KV of all sequences. Invariant: a published block is never written."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        num_states: int = 0,
    ) -> None:
        num_slots = (NUM_OWN_BLOCKS + num_blocks) * block_tokens
        # One tensor per layer: views of one big tensor defeat the compiler.
        self.shapes = tuple(shapes)
        self.keys = [_zeros((num_slots, s.num_kv_heads, s.key_dim), dtype, device) for s in shapes]
        self.values = [
            keys[..., : s.value_dim]
            if s.values_in_keys
            else _zeros((num_slots, s.num_kv_heads, s.value_dim), dtype, device)
            for s, keys in zip(shapes, self.keys, strict=True)
        ]
        pairs = zip(self.keys, self.values, strict=True)
        self.by_head = [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in pairs]
        """Views for attention: keys and values [1, H, S, D] of each layer."""
        own_values = [rows for s, rows in zip(shapes, self.values, strict=True) if not s.values_in_keys]
        self._stored = [as_bits(rows) for rows in (*self.keys, *own_values) if rows.numel()]
        self._by_block = [rows.view(-1, block_tokens, *rows.shape[1:]) for rows in self._stored]
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.device = device
        self.states = StateSlots(num_states, block_tokens)
        self._pool = BlockPool(range(NUM_OWN_BLOCKS, NUM_OWN_BLOCKS + num_blocks))
        self._sequences: set[SequenceKV] = set()

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated (`BlockPool.num_free`)."""
        return self._pool.num_free

    def new_sequence(self) -> SequenceKV:
        """Create an empty sequence; it has no blocks until `reserve` or `adopt`."""
        seq = SequenceKV()
        self._sequences.add(seq)
        return seq

    def num_published(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading hashes whose blocks could be adopted."""
        return len(self._adoptable(hashes))

    def has_room(self, hashes: Sequence[BlockHash], num_tokens: int, num_spare: int = 0) -> bool:
        """Whether a new sequence of `num_tokens` rows fits, with `num_spare` blocks left over.

        The sequence adopts the published blocks among `hashes`. Adopting a block that is in use takes no room; adopting
        an unused one does, because it counts as free.
        """
        in_use = [block for block in self._adoptable(hashes) if not self._pool.is_unused(block)]
        num_needed = self.num_blocks_for(num_tokens) - len(in_use)
        return num_needed + num_spare <= self.num_free_blocks

    def adopt(self, seq: SequenceKV, hashes: Sequence[BlockHash]) -> int:
        """Start an empty sequence with the published blocks of these hashes, up to the first missing one.

        Returns the number of rows in these blocks; all are valid.
        """
        assert not seq.blocks, "only an empty sequence begins with blocks of others"
        seq.blocks = self._adoptable(hashes)
        for block in seq.blocks:
            self._pool.use(block)
        self.states.adopt(seq, hashes[: len(seq.blocks)])
        seq.num_tokens = len(seq.blocks) * self.block_tokens
        return seq.num_tokens

    def publish(self, seq: SequenceKV, hashes: Sequence[BlockHash]) -> None:
        """Publish the first blocks of a sequence, one for each hash. All their rows must be valid."""
        assert len(hashes) * self.block_tokens <= seq.num_tokens, "only full blocks are published"
        for block, block_hash in zip(seq.blocks, hashes, strict=False):
            self._pool.publish(block, block_hash)
        self.states.publish(seq, hashes)

    def reserve(self, seq: SequenceKV, num_tokens: int) -> None:
        """Reserve blocks for `num_tokens` rows in total. Raises: OutOfBlocks."""
        self.reserve_all([(seq, num_tokens)])

    def reserve_all(self, wanted: Iterable[tuple[SequenceKV, int]]) -> None:
        """Reserve blocks for each sequence's total number of rows, and make its next rows writable; all or none.

        Raises: OutOfBlocks; torch.OutOfMemoryError if the device has no memory to erase or copy blocks.
        """
        unready = [(seq, num_tokens) for seq, num_tokens in wanted if not self._is_ready(seq, num_tokens)]
        if not unready:
            return
        lacking = [(seq, max(0, self.num_blocks_for(num_tokens) - len(seq.blocks))) for seq, num_tokens in unready]
        to_write = [
            (seq, index) for seq, _ in lacking for index in range(seq.num_tokens // self.block_tokens, len(seq.blocks))
        ]
        to_copy = [(seq, index) for seq, index in to_write if self._pool.is_shared(seq.blocks[index])]
        num_needed = sum(count for _, count in lacking) + len(to_copy)
        if num_needed > self.num_free_blocks:
            raise OutOfBlocks(f"{num_needed} KV blocks needed, {self.num_free_blocks} free")
        for seq, index in to_write:
            self._pool.unpublish(seq.blocks[index])
        copies = [(seq, index, self._pool.allocate(None)[0]) for seq, index in to_copy]
        taken = [self._append_block(seq) for seq, count in lacking for _ in range(count)]
        foreign = [block for block, is_own in taken if not is_own] + [block for _, _, block in copies]
        try:
            if foreign:
                self.erase(foreign)
            for copy in copies:
                self._copy_rows(*copy)
        except torch.OutOfMemoryError:
            self._return_unclaimed(lacking, [block for _, _, block in copies])
            raise
        for copy in copies:
            self._replace(*copy)

    def extend(self, seq: SequenceKV, num_tokens: int) -> None:
        """Count `num_tokens` more rows as valid; the step that ends now has written them."""
        assert self.num_blocks_for(seq.num_tokens + num_tokens) <= len(seq.blocks), "rows beyond the block table"
        written = seq.blocks[seq.num_tokens // self.block_tokens :]
        assert self._pool.are_private(written), "rows were written that others may read"
        seq.num_tokens += num_tokens

    def mark_nan(self, seq: SequenceKV) -> None:
        """Mark a sequence for which NaN was computed: each of its new blocks will be erased."""
        seq.may_hold_nan = True

    def truncate(self, seq: SequenceKV, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` rows and release the blocks after them."""
        assert 0 <= num_tokens <= seq.num_tokens, f"cannot truncate {seq.num_tokens} rows to {num_tokens}"
        seq.num_tokens = num_tokens
        self.states.truncate(seq, num_tokens)
        num_kept = self.num_blocks_for(num_tokens)
        if num_kept == len(seq.blocks):
            return
        for block in reversed(seq.blocks[num_kept:]):  # last block first: the first blocks are kept longest
            self._pool.release(block, seq)
        del seq.blocks[num_kept:]

    def compact(self, seq: SequenceKV, base_tokens: int, path: Sequence[int]) -> None:
        """Keep the first `base_tokens` rows, and move the rows at offsets `path` right after them; drop the rest."""
        if not path:
            self.truncate(seq, base_tokens)
            return
        assert all(a < b for a, b in pairwise(path)), "a path goes down the tree"
        assert base_tokens + path[-1] < seq.num_tokens, "a path ends within the rows written"
        self.states.compact(seq, base_tokens, path)
        moves = [(offset, row) for row, offset in enumerate(path) if offset != row]
        if moves:
            first = (base_tokens + moves[0][1]) // self.block_tokens
            assert self._pool.are_private(seq.blocks[first:]), "guesses are not published"
            sources = [self.slot(seq, base_tokens + offset) for offset, _ in moves]
            self.move(sources, [self.slot(seq, base_tokens + row) for _, row in moves])
        self.truncate(seq, base_tokens + len(path))

    def free(self, seq: SequenceKV) -> None:
        """Release all blocks; the sequence must not be used again."""
        assert seq in self._sequences, "a sequence that was freed, or is of another cache"
        self.truncate(seq, 0)
        self._sequences.remove(seq)

    def slot(self, seq: SequenceKV, row: int) -> int:
        """Index of the sequence's row `row` in each layer's tensor."""
        return seq.blocks[row // self.block_tokens] * self.block_tokens + row % self.block_tokens

    def slots(self, seq: SequenceKV, first: int, end: int) -> list[int]:
        """Slots of rows `first` to `end` (exclusive)."""
        blocks, size = seq.blocks, self.block_tokens
        return [blocks[row // size] * size + row % size for row in range(first, end)]

    def erase(self, blocks: Sequence[int]) -> None:
        """Zero new blocks: a masked row has weight 0, but 0 times a NaN left by another sequence is NaN.

        Blocks that a sequence gets back after releasing them, mostly for rejected guesses, are not erased.
        """
        index = self._slot_tensor(blocks)
        for rows in self._by_block:
            rows.index_fill_(0, index, 0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to slots `targets` in all layers."""
        source, target = upload([list(sources), list(targets)], self.device, torch.int64).unbind()
        for rows in self._stored:
            rows.index_copy_(0, target, rows.index_select(0, source))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def check_integrity(self) -> None:
        """Raises: AssertionError unless every block is accounted for once, and every length fits its table."""
        self.states.check_integrity(self._sequences)
        self._pool.check_integrity(Counter(block for seq in self._sequences for block in seq.blocks))
        for seq in self._sequences:
            assert len(set(seq.blocks)) == len(seq.blocks), "a sequence has a block twice"
            assert 0 <= seq.num_tokens <= len(seq.blocks) * self.block_tokens, "a length exceeds its block table"

    def _adoptable(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Published blocks of these hashes up to the first missing one; if states are used, to a published one."""
        found = self._pool.lookup(hashes)
        return found[: self.states.num_adoptable(hashes[: len(found)])]

    def _is_ready(self, seq: SequenceKV, num_tokens: int) -> bool:
        """Whether the blocks have room for `num_tokens` rows, and none of those to be written is published."""
        to_write = seq.blocks[seq.num_tokens // self.block_tokens :]
        return num_tokens <= len(seq.blocks) * self.block_tokens and self._pool.are_private(to_write)

    def _copy_rows(self, seq: SequenceKV, index: int, copy: int) -> None:
        """Copy the valid rows of a shared block to block `copy`."""
        sources = self.slots(seq, index * self.block_tokens, seq.num_tokens)
        if sources:
            first = copy * self.block_tokens
            self.move(sources, range(first, first + len(sources)))

    def _replace(self, seq: SequenceKV, index: int, copy: int) -> None:
        """Replace a shared block with `copy`."""
        self._pool.release(seq.blocks[index], None)
        self._pool.use(copy)
        seq.blocks[index] = copy

    def _return_unclaimed(self, appended: Iterable[tuple[SequenceKV, int]], copies: Iterable[int]) -> None:
        """Undo an allocation: release the last `count` blocks of each sequence, and the copies, which have no user yet.

        These blocks may not have been erased, so they may still hold rows of other sequences.
        """
        for seq, count in appended:
            for _ in range(count):
                self._pool.release(seq.blocks.pop(), None)
        self._pool.return_unclaimed(copies)

    def _append_block(self, seq: SequenceKV) -> tuple[int, bool]:
        """Append a block to a sequence. Returns it, and whether it holds only rows that the sequence wrote itself."""
        block, user = self._pool.allocate(seq.blocks[-1] + 1 if seq.blocks else None)
        self._pool.use(block)
        seq.blocks.append(block)
        return block, user is seq and not seq.may_hold_nan

    def _slot_tensor(self, slots: Sequence[int]) -> torch.Tensor:
        return upload(list(slots), self.device, torch.int64)
