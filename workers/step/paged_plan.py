"""A step as one array of integers, as a kernel over block tables reads it, so that one copy takes it to the GPU.

A sequence's rows are one segment if they are a chain, and two if the chain of its tokens ends in a tree. The array may
be larger than a step needs: each padding row is a segment of its own, which writes to the sink block and reads one row
of the blank block; after them come segments of zero rows.

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
from workers.step.readers import Span
from workers.step.rows import Step

NO_SLOT = -1
"""Pads the slots of a row's lineage."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjoining rows of one sequence: a chain, whose last row sees `num_seen` rows of KV; or nodes of a tree, each of
    which sees the first `num_seen` rows and its own lineage."""

    kv: SequenceKV
    num_rows: int
    num_seen: int
    lineages: tuple[tuple[int, ...], ...] = ()
    """Rows of KV of each node's ancestors and of itself, but for the root and what is above it."""

    @property
    def is_tree(self) -> bool:
        return bool(self.lineages)


def segments_of(spans: Sequence[Span]) -> list[Segment]:
    """The segments of a step's rows, in order."""
    ends = [*accumulate(span.num_rows for span in spans)]
    assert [span.first_row for span in spans] == [0, *ends][: len(spans)], "spans follow each other"
    return [segment for span in spans for segment in _segments(span)]


def _segments(span: Span) -> Iterator[Segment]:
    if span.parents == tuple(range(ROOT, len(span.parents) - 1)):
        yield Segment(span.kv, span.num_rows, span.num_kv)
        return
    if span.num_chain:
        yield Segment(span.kv, span.num_chain, span.root + 1)
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(span.parents):
        paths[node] = (*paths[parent], span.root + 1 + node)
    lineages = tuple(paths[node] for node in range(span.num_cached_nodes, len(span.parents)))
    if lineages:
        yield Segment(span.kv, len(lineages), span.root + 1, lineages)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step's arrays."""

    num_rows: int
    num_wanted: int
    num_segments: int
    num_blocks: int
    """KV blocks of each segment."""
    longest: int
    """Rows of the longest segment."""
    num_ancestors: int
    """Length of a node's lineage, itself included; 0 without trees."""

    @classmethod
    def of(cls, cache: KVCache, step: Step, segments: Sequence[Segment]) -> StepShape:
        """The least shape for a step."""
        num_padding = len(step.ids) - sum(segment.num_rows for segment in segments)
        return cls(
            num_rows=len(step.ids),
            num_wanted=len(step.wanted),
            num_segments=len(segments) + num_padding,
            num_blocks=max(cache.num_blocks_for(max(segment.num_seen, segment.num_rows)) for segment in segments),
            longest=max(segment.num_rows for segment in segments),
            num_ancestors=max((len(path) for segment in segments for path in segment.lineages), default=0),
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

    def fill(self, cache: KVCache, step: Step, segments: Sequence[Segment]) -> NDArray[np.int32]:
        """The step padded to this shape, which must have room for it.  # [num_values]"""
        values = np.zeros(self.num_values, dtype=np.int32)
        pieces = self.cut(values)
        for name, rows in (("ids", step.ids), ("positions", step.positions), ("wanted", step.wanted)):
            pieces[name][: len(rows)] = rows
        num_rows = sum(segment.num_rows for segment in segments)
        sizes = [segment.num_rows for segment in segments] + [1] * (self.num_rows - num_rows)
        pieces["starts"][1 : len(sizes) + 1] = np.cumsum(sizes)
        pieces["starts"][len(sizes) + 1 :] = self.num_rows
        self._fill_slots(cache, step.spans, pieces["write_slots"])
        self._fill_reads(cache, segments, pieces)
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
            "starts": (self.num_segments + 1,),
            "lengths": (self.num_segments,),
            "table": (self.num_segments, self.num_blocks),
        }
        if self.num_ancestors:
            shapes |= {"prefixes": (self.num_segments,), "lineage": (self.num_rows, self.num_ancestors)}
        return shapes

    @staticmethod
    def _fill_slots(cache: KVCache, spans: Sequence[Span], slots: NDArray[np.int32]) -> None:
        slots[:] = SINK_BLOCK * cache.block_tokens
        for span in spans:
            slots[span.first_row : span.first_row + span.num_rows] = _slots(
                cache, span.kv, np.arange(span.kv.num_tokens, span.num_kv)
            )

    def _fill_reads(self, cache: KVCache, segments: Sequence[Segment], pieces: dict[str, NDArray[np.int32]]) -> None:
        """What a pass computes for a segment of the other kind is dropped, but kernels need valid input: a causal pass
        sees at least the segment's own number of rows, an unmasked one at least one row."""
        pieces["table"][:] = BLANK_BLOCK
        pieces["lengths"][:] = 1
        if self.num_ancestors:
            pieces["prefixes"][:] = 1
            pieces["lineage"][:] = NO_SLOT
        first = 0
        for index, segment in enumerate(segments):
            blocks = segment.kv.blocks[: self.num_blocks]
            pieces["table"][index, : len(blocks)] = blocks
            pieces["lengths"][index] = segment.num_rows if segment.is_tree else segment.num_seen
            if segment.is_tree:
                pieces["prefixes"][index] = segment.num_seen
            for row, path in enumerate(segment.lineages, first):
                pieces["lineage"][row, : len(path)] = _slots(cache, segment.kv, np.array(path))
            first += segment.num_rows


def _slots(cache: KVCache, kv: SequenceKV, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots of these rows of KV."""
    blocks = np.array(kv.blocks, dtype=np.int64)
    slots: NDArray[np.int64] = blocks[rows // cache.block_tokens] * cache.block_tokens + rows % cache.block_tokens
    return slots
