"""A step as one array of integers, in the sizes that a kernel over block tables wants: what a GPU is handed, at once.

A sequence's rows are one part where they go straight down, and two where the chain of its tokens ends in a tree. Sizes
may be larger than a step needs: each row of padding is a part of its own, which writes to the sink block and reads one
row of the blank one, and parts of no rows follow.

Knows spans and slots. Must not know tensors on devices, models or arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.speculation import ROOT
from workers.step.kv_cache import BLANK_BLOCK, SINK_BLOCK, KVCache, SequenceKV
from workers.step.plan import Span
from workers.step.rows import Step

NOBODY = -1
"""Fills up the slots of a row's lineage."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence that lie together: a chain, of which the last sees `num_seen` rows of KV, or nodes of a
    tree, which all see the first `num_seen`, and besides them their lineage."""

    kv: SequenceKV
    num_rows: int
    num_seen: int
    lineages: tuple[tuple[int, ...], ...] = ()
    """Rows of KV of each node's ancestors and of itself, but for the root and what is above it."""

    @property
    def is_tree(self) -> bool:
        return bool(self.lineages)


def parts_of(spans: Sequence[Span]) -> list[Part]:
    """The parts of a step's rows, in order."""
    ends = [*accumulate(span.num_rows for span in spans)]
    assert [span.first_row for span in spans] == [0, *ends][: len(spans)], "spans follow each other"
    return [part for span in spans for part in _parts(span)]


def _parts(span: Span) -> Iterator[Part]:
    if span.parents == tuple(range(ROOT, len(span.parents) - 1)):
        yield Part(span.kv, span.num_rows, span.num_kv)
        return
    if span.num_chain:
        yield Part(span.kv, span.num_chain, span.root + 1)
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(span.parents):
        paths[node] = (*paths[parent], span.root + 1 + node)
    lineages = tuple(paths[node] for node in range(span.num_held, len(span.parents)))
    if lineages:
        yield Part(span.kv, len(lineages), span.root + 1, lineages)


@dataclass(frozen=True, slots=True)
class Form:
    """How much room there is for each thing that a step has."""

    num_rows: int
    num_wanted: int
    num_parts: int
    num_blocks: int
    """Of KV, to each part."""
    longest: int
    """Rows of the longest part."""
    num_ancestors: int
    """Of a node, itself included; 0 where there are no trees."""

    @classmethod
    def of(cls, cache: KVCache, step: Step, parts: Sequence[Part]) -> Form:
        """What the step needs and no more."""
        num_padding = len(step.ids) - sum(part.num_rows for part in parts)
        return cls(
            num_rows=len(step.ids),
            num_wanted=len(step.wanted),
            num_parts=len(parts) + num_padding,
            num_blocks=max(cache.num_blocks_for(max(part.num_seen, part.num_rows)) for part in parts),
            longest=max(part.num_rows for part in parts),
            num_ancestors=max((len(path) for part in parts for path in part.lineages), default=0),
        )

    @property
    def num_values(self) -> int:
        return sum(prod(shape) for shape in self._shapes().values())

    def cut(self, values: Any) -> dict[str, Any]:
        """By name, the pieces of an array or a tensor of `num_values`, without copying any."""
        pieces, first = {}, 0
        for name, shape in self._shapes().items():
            pieces[name] = values[first : first + prod(shape)].reshape(shape)
            first += prod(shape)
        return pieces

    def fill(self, cache: KVCache, step: Step, parts: Sequence[Part]) -> NDArray[np.int32]:
        """The step in this form, which must have room for it.  # [num_values]"""
        values = np.zeros(self.num_values, dtype=np.int32)
        pieces = self.cut(values)
        for name, rows in (("ids", step.ids), ("positions", step.positions), ("wanted", step.wanted)):
            pieces[name][: len(rows)] = rows
        num_rows = sum(part.num_rows for part in parts)
        sizes = [part.num_rows for part in parts] + [1] * (self.num_rows - num_rows)
        pieces["starts"][1 : len(sizes) + 1] = np.cumsum(sizes)
        pieces["starts"][len(sizes) + 1 :] = self.num_rows
        self._fill_slots(cache, step.spans, pieces["write_slots"])
        self._fill_reads(cache, parts, pieces)
        return values

    def blank(self, cache: KVCache) -> NDArray[np.int32]:
        """Nothing but padding.  # [num_values]"""
        return self.fill(cache, Step([], [], [], []), [])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (self.num_rows,),
            "positions": (self.num_rows,),
            "wanted": (self.num_wanted,),
            "write_slots": (self.num_rows,),
            "starts": (self.num_parts + 1,),
            "lengths": (self.num_parts,),
            "table": (self.num_parts, self.num_blocks),
        }
        if self.num_ancestors:
            shapes |= {"prefixes": (self.num_parts,), "lineage": (self.num_rows, self.num_ancestors)}
        return shapes

    @staticmethod
    def _fill_slots(cache: KVCache, spans: Sequence[Span], slots: NDArray[np.int32]) -> None:
        slots[:] = SINK_BLOCK * cache.block_tokens
        for span in spans:
            slots[span.first_row : span.first_row + span.num_rows] = _slots(
                cache, span.kv, np.arange(span.kv.num_tokens, span.num_kv)
            )

    def _fill_reads(self, cache: KVCache, parts: Sequence[Part], pieces: dict[str, NDArray[np.int32]]) -> None:
        """Whatever a pass computes for a part that it is not meant for is dropped, but it has to see enough to be
        computed at all: a causal pass as many rows as the part has, an unmasked one a row."""
        pieces["table"][:] = BLANK_BLOCK
        pieces["lengths"][:] = 1
        if self.num_ancestors:
            pieces["prefixes"][:] = 1
            pieces["lineage"][:] = NOBODY
        first = 0
        for place, part in enumerate(parts):
            blocks = part.kv.blocks[: self.num_blocks]
            pieces["table"][place, : len(blocks)] = blocks
            pieces["lengths"][place] = part.num_rows if part.is_tree else part.num_seen
            if part.is_tree:
                pieces["prefixes"][place] = part.num_seen
            for row, path in enumerate(part.lineages, first):
                pieces["lineage"][row, : len(path)] = _slots(cache, part.kv, np.array(path))
            first += part.num_rows


def _slots(cache: KVCache, kv: SequenceKV, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where these rows of KV lie."""
    blocks = np.array(kv.blocks, dtype=np.int64)
    slots: NDArray[np.int64] = blocks[rows // cache.block_tokens] * cache.block_tokens + rows % cache.block_tokens
    return slots
