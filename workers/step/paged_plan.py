"""A step as one array of integers, copied to the GPU at once and read by the paged attention kernel.

A row sees the first `seen` rows of its sequence's KV. A tree node sees the KV up to its root and, after the root, the
rows that its bitmask marks: its ancestors and itself. Adjacent rows of one sequence form a tile, which the kernel
computes together. The array may be larger than a step needs. Padding rows belong to no tile, so their attention is
undefined; they write to the sink block.

Knows spans and slots. Must not know tensors on devices, models or arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.step.kv_cache import SINK_BLOCK, KVCache
from workers.step.plan import NO_TILING, Tiling, split_stretches
from workers.step.readers import Reader, Span, ancestor_bits, branches_of
from workers.step.rows import Step

TILE_ROWS = 16
"""Rows of a tile if a sequence has several. Together with the heads that share KV they fill a tensor core's operand."""
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step's arrays."""

    num_rows: int
    num_wanted: int
    num_tiles: int
    num_readers: int
    """Number of sequences; or of branches, if each branch of a tree is read as a chain."""
    num_blocks: int
    """Entries of a reader's block table."""
    num_words: int
    """Words of a row's bitmask, one bit for each node; 0 without trees."""
    depth: int
    """Levels of the deepest tree below its root; 0 without trees."""
    tile_rows: int
    """Largest number of rows of a tile: 1 if each sequence has one row and no row is a tree node."""
    block_tokens: int
    """KV rows of each entry of a block table."""

    @classmethod
    def of(cls, cache: KVCache, step: Step, tiling: Tiling = NO_TILING) -> StepShape:
        """The smallest shape with room for a step."""
        readers = _readers(step, tiling)
        is_tiled = tiling.by_branch or any(reader.num_rows > 1 or not reader.is_chain for reader in readers)
        trees = [reader for reader in readers if isinstance(reader, Span) and not reader.is_chain]
        block_tokens = min(reader.stretches(cache)[1] for reader in readers)
        return cls(
            num_rows=len(step.ids),
            num_wanted=len(step.wanted),
            num_tiles=sum(len(_runs(reader.rows, TILE_ROWS if is_tiled else 1)) for reader in readers),
            num_readers=len(readers),
            num_blocks=max(-(-reader.num_kv // block_tokens) for reader in readers),
            num_words=max((-(-len(span.parents) // WORD_BITS) for span in trees), default=0),
            depth=max((span.depth for span in trees), default=0),
            tile_rows=TILE_ROWS if is_tiled else 1,
            block_tokens=block_tokens,
        )

    @property
    def num_values(self) -> int:
        return sum(prod(shape) for shape in self._shapes().values())

    def cut(self, values: Any) -> dict[str, Any]:
        """Cut an array or a tensor of `num_values` into views, by name."""
        pieces, first = {}, 0
        for name, shape in self._shapes().items():
            pieces[name] = values[first : first + prod(shape)].reshape(shape)
            first += prod(shape)
        return pieces

    def fill(self, cache: KVCache, step: Step, tiling: Tiling = NO_TILING) -> NDArray[np.int32]:
        """Lay out a step in this shape, which must have room for it.  # [num_values or less]

        Block tables come last. Those of absent readers are left out, because no row reads them.
        """
        values = np.zeros(self.num_values, dtype=np.int32)
        pieces = self.cut(values)
        for name, rows in (("ids", step.ids), ("positions", step.positions), ("wanted", step.wanted)):
            pieces[name][: len(rows)] = rows
        pieces["write_slots"][:] = SINK_BLOCK * cache.block_tokens
        for span in step.spans:
            own = np.arange(span.num_kv - span.num_rows, span.num_kv)
            blocks, size = np.array(span.kv.blocks, dtype=np.int32), cache.block_tokens
            pieces["write_slots"][span.first_row : span.first_row + span.num_rows] = (
                blocks[own // size] * size + own % size
            )
        readers = _readers(step, tiling)
        tiles = [
            tile for index, reader in enumerate(readers) for tile in self._fill_reads(cache, index, reader, pieces)
        ]
        if tiles:
            pieces["tiles"][: len(tiles)] = tiles
            pieces["num_tiles"][0] = len(tiles)
        return values[: len(values) - (self.num_readers - len(readers)) * self.num_blocks]

    def blank(self, cache: KVCache) -> NDArray[np.int32]:
        """A step of padding only.  # [num_values or less]"""
        return self.fill(cache, Step([], [], [], []))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "ids": (self.num_rows,),
            "positions": (self.num_rows,),
            "wanted": (self.num_wanted,),
            "write_slots": (self.num_rows,),
            "seen": (self.num_rows,),
            "masks": (self.num_rows, self.num_words),
            "num_tiles": (1,),
            "tiles": (self.num_tiles, 4),
            "table": (self.num_readers, self.num_blocks),
        }

    def _fill_reads(
        self, cache: KVCache, index: int, reader: Reader, pieces: dict[str, NDArray[np.int32]]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Fill in what a reader's rows see. Yields its tiles: (first row, number of rows, reader, end of the KV)."""
        entries, tokens = reader.stretches(cache)
        blocks = split_stretches(entries, tokens // self.block_tokens)[: self.num_blocks]
        pieces["table"][index, : len(blocks)] = blocks
        pieces["seen"][np.asarray(reader.rows)] = np.arange(reader.num_kv - reader.num_rows, reader.num_kv) + 1
        if isinstance(reader, Span) and not reader.is_chain:
            nodes = slice(reader.first_row + reader.num_chain, reader.first_row + reader.num_rows)
            pieces["seen"][nodes] = reader.root + 1
            bits = ancestor_bits(reader.parents)[reader.num_cached_nodes :]
            words = b"".join(each.to_bytes(4 * self.num_words, "little") for each in bits)
            pieces["masks"][nodes] = np.frombuffer(words, np.int32).reshape(-1, self.num_words)
        for first, count in _runs(reader.rows, self.tile_rows):
            last_end = int(pieces["seen"][first + count - 1])
            yield first, count, index, last_end if reader.is_chain else reader.num_kv


def _readers(step: Step, tiling: Tiling) -> list[Reader]:
    """Readers of a step: spans; in deterministic mode branches, because a sum's bits depend on the order of KV."""
    return [reader for span in step.spans for reader in (branches_of(span) if tiling.by_branch else [span])]


def _runs(rows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Runs of adjacent rows, at most `most` rows each, as (first row, number of rows)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == sum(runs[-1]) and runs[-1][1] < most:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return runs
