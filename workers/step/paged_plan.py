"""A step as one array of integers, as the paged attention kernel reads it, so that one copy takes it to the GPU.

A row sees the first `seen` rows of its sequence's KV. A node of a tree sees the KV up to its root, and of the rows
behind it those that its bitmask names: its ancestors and itself. Adjoining rows of one sequence form a tile, which the
kernel computes together. The array may be larger than a step needs: padding rows see nothing and write to the sink
block.

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
from workers.step.readers import Span, lineage_bits
from workers.step.rows import Step

TILE_ROWS = 16
"""Rows of a tile, where a sequence has several; with the heads that share KV they fill a tensor core's operand."""
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step's arrays."""

    num_rows: int
    num_wanted: int
    num_tiles: int
    num_sequences: int
    num_blocks: int
    """KV blocks of each sequence."""
    num_words: int
    """Words of a row's bitmask, one bit a node; 0 without trees."""
    depth: int
    """Levels of the deepest tree below its root; 0 without trees."""
    tile_rows: int
    """Most rows of a tile: 1 where each sequence has one row."""

    @classmethod
    def of(cls, cache: KVCache, step: Step) -> StepShape:
        """The least shape for a step."""
        tile_rows = TILE_ROWS if any(span.num_rows > 1 for span in step.spans) else 1
        trees = [span for span in step.spans if not span.is_chain]
        return cls(
            num_rows=len(step.ids),
            num_wanted=len(step.wanted),
            num_tiles=sum(-(-count // tile_rows) for count in _stretches(step)),
            num_sequences=len(step.spans),
            num_blocks=max(cache.num_blocks_for(span.num_kv) for span in step.spans),
            num_words=max((-(-len(span.parents) // WORD_BITS) for span in trees), default=0),
            depth=max((span.depth for span in trees), default=0),
            tile_rows=tile_rows,
        )

    @property
    def num_values(self) -> int:
        return sum(prod(shape) for shape in self._shapes().values())

    def cut(self, values: Any) -> dict[str, Any]:
        """Views of an array or a tensor of `num_values`, by name."""
        pieces, first = {}, 0
        for name, shape in self._shapes().items():
            pieces[name] = values[first : first + prod(shape)].reshape(shape)
            first += prod(shape)
        return pieces

    def fill(self, cache: KVCache, step: Step) -> NDArray[np.int32]:
        """The step padded to this shape, which must have room for it.  # [num_values or less]

        Block tables come last; those of absent sequences are left out, since no row reads them.
        """
        values = np.zeros(self.num_values, dtype=np.int32)
        pieces = self.cut(values)
        for name, rows in (("ids", step.ids), ("positions", step.positions), ("wanted", step.wanted)):
            pieces[name][: len(rows)] = rows
        pieces["write_slots"][:] = SINK_BLOCK * cache.block_tokens
        tiles = [tile for index, span in enumerate(step.spans) for tile in self._fill_span(cache, index, span, pieces)]
        num_rows = sum(span.num_rows for span in step.spans)
        tiles += _tiles(num_rows, self.num_rows, self.tile_rows)
        pieces["tiles"][: len(tiles)] = tiles
        return values[: len(values) - (self.num_sequences - len(step.spans)) * self.num_blocks]

    def blank(self, cache: KVCache) -> NDArray[np.int32]:
        """Nothing but padding.  # [num_values or less]"""
        return self.fill(cache, Step([], [], [], []))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "ids": (self.num_rows,),
            "positions": (self.num_rows,),
            "wanted": (self.num_wanted,),
            "write_slots": (self.num_rows,),
            "seen": (self.num_rows,),
            "masks": (self.num_rows, self.num_words),
            "tiles": (self.num_tiles, 4),
            "table": (self.num_sequences, self.num_blocks),
        }

    def _fill_span(
        self, cache: KVCache, index: int, span: Span, pieces: dict[str, NDArray[np.int32]]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Fill in the rows of one span; returns its tiles: first row, number of rows, sequence, end of the KV."""
        first, end, before = span.first_row, span.first_row + span.num_rows, span.num_kv - span.num_rows
        blocks = np.array(span.kv.blocks, dtype=np.int32)
        own = np.arange(before, span.num_kv)
        pieces["write_slots"][first:end] = blocks[own // cache.block_tokens] * cache.block_tokens + own % cache.block_tokens
        pieces["table"][index, : min(len(blocks), self.num_blocks)] = blocks[: self.num_blocks]
        pieces["seen"][first:end] = own + 1
        if not span.is_chain:
            nodes = slice(first + span.num_chain, end)
            pieces["seen"][nodes] = span.root + 1
            bits = lineage_bits(span.parents)[span.num_cached_nodes :]
            words = b"".join(each.to_bytes(4 * self.num_words, "little") for each in bits)
            pieces["masks"][nodes] = np.frombuffer(words, np.int32).reshape(-1, self.num_words)
        for row, count, _, _ in _tiles(first, end, self.tile_rows):
            yield row, count, index, before + row - first + count if span.is_chain else span.num_kv


def _stretches(step: Step) -> list[int]:
    """The number of rows of each span, and of padding."""
    counts = [span.num_rows for span in step.spans]
    return [*counts, len(step.ids) - sum(counts)]


def _tiles(first: int, end: int, tile_rows: int) -> Iterator[tuple[int, int, int, int]]:
    for row in range(first, end, tile_rows):
        yield row, min(tile_rows, end - row), 0, 0
