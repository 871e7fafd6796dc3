"""Keys and values of all sequences in one pool of fixed-size blocks; roll back by length, compact after a tree.

Knows which block belongs to whom. Must not know tokens, positions or models: `num_tokens` counts rows of KV, whatever
they stand for.
Two blocks belong to nobody: padded block tables point to one that is never written, padding rows write to the other,
so that what a broken sequence leaves in a padding row is read by no one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

BLANK_BLOCK = 0
"""Read where a block table is padded; all zeros for ever."""
SINK_BLOCK = 1
"""Written by padding rows; never read."""
NUM_OWN_BLOCKS = 2


class OutOfBlocks(Exception):
    """The pool has too few free blocks; nothing was changed."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(eq=False, slots=True)
class SequenceKV:
    """The blocks of one sequence, in order; only `KVCache` changes it. Invariant: `num_tokens` rows fit into them."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Rows whose KV is valid."""


class KVCache:
    """A pool of KV blocks; every block is free or owned by exactly one sequence."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots = (
            NUM_OWN_BLOCKS + num_blocks
        ) * block_tokens  # one tensor per layer: views of one big one defeat the compiler
        self.keys = [torch.zeros(num_slots, s.num_kv_heads, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(num_slots, s.num_kv_heads, s.value_dim, dtype=dtype, device=device) for s in shapes]
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.device = device
        self._free = dict.fromkeys(range(NUM_OWN_BLOCKS, NUM_OWN_BLOCKS + num_blocks))  # a set that keeps its order
        self._sequences: set[SequenceKV] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def new_sequence(self) -> SequenceKV:
        """An empty sequence; it holds no block until `reserve`."""
        seq = SequenceKV()
        self._sequences.add(seq)
        return seq

    def reserve(self, seq: SequenceKV, num_tokens: int) -> None:
        """Make room for `num_tokens` rows in all. Raises: OutOfBlocks."""
        self.reserve_all([(seq, num_tokens)])

    def reserve_all(self, wanted: Iterable[tuple[SequenceKV, int]]) -> None:
        """Make room for each sequence's total of rows, or for none of them. Raises: OutOfBlocks."""
        lacking = [(seq, self.num_blocks_for(num_tokens) - len(seq.blocks)) for seq, num_tokens in wanted]
        num_needed = sum(max(0, count) for _, count in lacking)
        if num_needed > len(self._free):
            raise OutOfBlocks(f"{num_needed} KV blocks needed, {len(self._free)} free")
        taken = [self._take_block(seq) for seq, count in lacking for _ in range(count)]
        if taken:
            self.erase(taken)

    def extend(self, seq: SequenceKV, num_tokens: int) -> None:
        """Count `num_tokens` further rows as valid; they have been written by the step that ends now."""
        assert self.num_blocks_for(seq.num_tokens + num_tokens) <= len(seq.blocks), "rows beyond the block table"
        seq.num_tokens += num_tokens

    def truncate(self, seq: SequenceKV, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` rows and free the blocks behind them."""
        assert 0 <= num_tokens <= seq.num_tokens, f"cannot truncate {seq.num_tokens} rows to {num_tokens}"
        seq.num_tokens = num_tokens
        num_kept = self.num_blocks_for(num_tokens)
        self._free.update(dict.fromkeys(seq.blocks[num_kept:]))
        del seq.blocks[num_kept:]

    def compact(self, seq: SequenceKV, base_tokens: int, path: Sequence[int]) -> None:
        """Keep `base_tokens` rows and, right behind them, the rows at offsets `path` after them; drop the rest."""
        assert all(a < b for a, b in pairwise(path)), "a path goes down the tree"
        assert not path or base_tokens + path[-1] < seq.num_tokens, "a path ends within the rows written"
        moves = [(offset, row) for row, offset in enumerate(path) if offset != row]
        if moves:
            sources = [self.slot(seq, base_tokens + offset) for offset, _ in moves]
            self.move(sources, [self.slot(seq, base_tokens + row) for _, row in moves])
        self.truncate(seq, base_tokens + len(path))

    def free(self, seq: SequenceKV) -> None:
        """Give all blocks back; the sequence must not be used again."""
        assert seq in self._sequences, "freed twice, or of another cache"
        self.truncate(seq, 0)
        self._sequences.remove(seq)

    def slot(self, seq: SequenceKV, row: int) -> int:
        """Where row `row` of the sequence lies in each layer's tensor."""
        return seq.blocks[row // self.block_tokens] * self.block_tokens + row % self.block_tokens

    def erase(self, blocks: Sequence[int]) -> None:
        """Zero new blocks: masked rows weigh nothing, but nothing times a NaN that another sequence left is NaN."""
        index = self._slot_tensor(blocks)
        for rows in (*self.keys, *self.values):
            rows.view(-1, self.block_tokens, *rows.shape[1:]).index_fill_(0, index, 0.0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what lies in the slots `sources` to the slots `targets`, in all layers at once."""
        source, target = self._slot_tensor(sources), self._slot_tensor(targets)
        for rows in (*self.keys, *self.values):
            rows.index_copy_(0, target, rows.index_select(0, source))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def check_integrity(self) -> None:
        """Raises: AssertionError unless every block is free or owned once, and every length fits its table."""
        owned = Counter(block for seq in self._sequences for block in seq.blocks)
        assert not owned or max(owned.values()) == 1, "a block has two owners"
        assert not self._free.keys() & owned.keys(), "a free block has an owner"
        assert len(self._free) + len(owned) == self.num_blocks, "a block is lost"
        assert min(self._free.keys() | owned.keys()) >= NUM_OWN_BLOCKS, "a block of the cache's own is in use"
        for seq in self._sequences:
            assert 0 <= seq.num_tokens <= len(seq.blocks) * self.block_tokens, "a length exceeds its block table"

    def _take_block(self, seq: SequenceKV) -> int:
        """The block after the sequence's last if it is free, so that attention can often read KV in place."""
        follower = seq.blocks[-1] + 1 if seq.blocks else None
        block = follower if follower in self._free else next(iter(self._free))
        assert block is not None
        del self._free[block]
        seq.blocks.append(block)
        return block

    def _slot_tensor(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)
