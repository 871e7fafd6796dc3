"""Readers of a step: the rows that one sequence adds, whole or branch by branch, and the KV that they see.

Knows rows, slots, positions and masks; must not know tokens, nor how readers are grouped (`workers.step.plan`). A tree
node sees the KV before the tree, the chain above it, its ancestors and itself. Its position, which sliding windows
compare, is that of the root plus its depth.

In an encoder-decoder, the KV of a sequence begins with that of its source. Self-attention reads the rows after it, so
rows and positions are counted from there; cross-attention reads the source (`SourceReader`).

A masked tree gives each node the right KV, but not the bits of a chain: keys are summed in the order in which they are
stored. In deterministic mode each branch of a tree is therefore read on its own, with its slots in chain order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.speculation import ROOT
from workers.step.kv_cache import BLANK_BLOCK, KVCache, SequenceKV


@dataclass(slots=True)
class Span:
    """The rows that one sequence adds in a step: `num_chain` tokens, then nodes of a tree below the last one.

    The first `num_cached_nodes` nodes add no rows: their KV is already the end of the sequence's KV. All numbers are
    fixed when the span is made; they stay the same after `KVCache.extend` has counted its rows.
    """

    kv: SequenceKV
    first_row: int
    num_chain: int
    parents: tuple[int, ...] = ()
    num_cached_nodes: int = 0
    adapter: int = 0
    """Number of the adapter that its rows are computed with; 0 for none."""
    num_rows: int = field(init=False)
    num_source: int = field(init=False)
    """Number of KV rows of the source."""
    num_kv: int = field(init=False)
    """Number of slots after the source that the rows read, including those written in this step."""

    def __post_init__(self) -> None:
        self.num_rows = self.num_chain + len(self.parents) - self.num_cached_nodes
        self.num_source = self.kv.num_source
        self.num_kv = self.kv.num_tokens - self.num_source + self.num_rows

    @property
    def root(self) -> int:
        """The KV row of the tree's root after the source, which is also its position."""
        return self.num_kv - len(self.parents) - 1

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + self.num_rows)

    @property
    def is_chain(self) -> bool:
        """Whether each row sees all slots before its own."""
        return not self.parents or self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """Number of levels of the tree below its root."""
        return max((bits.bit_count() for bits in ancestor_bits(self.parents)), default=0)

    def mask_tree(
        self, visible: NDArray[np.bool_], query_positions: NDArray[np.int64], key_positions: NDArray[np.int64]
    ) -> None:
        """Change a chain's mask and positions to those of the tree, in place.  # [R, L], [R], [L]

        Of the rows after the root, a node sees its ancestors and itself.
        """
        ancestors = _ancestors(self.parents)
        nodes = slice(self.root + 1, self.root + 1 + len(self.parents))
        visible[self.num_chain : self.num_rows, nodes] = ancestors[self.num_cached_nodes :]
        key_positions[nodes] = self.root + ancestors.sum(axis=1)
        query_positions[:] = key_positions[query_positions]

    @property
    def last_slots(self) -> Sequence[int]:
        """The last of the reader's slots that each row sees, as if all rows were a chain."""
        return range(self.num_kv - self.num_rows, self.num_kv)

    def stretches(self, cache: KVCache) -> tuple[list[int], int]:
        """The blocks or slots to read, and the number of slots of each entry."""
        num_blocks, rest = divmod(self.num_source, cache.block_tokens)
        if not rest:
            return self.kv.blocks[num_blocks:], cache.block_tokens
        return cache.slots(self.kv, self.num_source, self.num_source + self.num_kv), 1


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows of a span that form a path in its tree, and all KV rows that the last of them sees, in order."""

    span: Span
    rows: list[int]
    seen: list[int]
    is_chain: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_kv(self) -> int:
        return len(self.seen)

    @property
    def last_slots(self) -> Sequence[int]:
        return range(self.num_kv - self.num_rows, self.num_kv)

    def stretches(self, cache: KVCache) -> tuple[list[int], int]:
        return [cache.slot(self.span.kv, self.span.num_source + row) for row in self.seen], 1


@dataclass(frozen=True, slots=True)
class SourceReader:
    """All rows of a span, each of which sees the whole source; a blank row if there is none."""

    span: Span
    is_chain: ClassVar[bool] = True

    @property
    def rows(self) -> range:
        return self.span.rows

    @property
    def num_rows(self) -> int:
        return self.span.num_rows

    @property
    def num_kv(self) -> int:
        return self.span.num_source or 1

    @property
    def last_slots(self) -> Sequence[int]:
        return [self.num_kv - 1] * self.num_rows

    def stretches(self, cache: KVCache) -> tuple[list[int], int]:
        num_blocks = cache.num_blocks_for(self.span.num_source)
        return self.span.kv.blocks[:num_blocks] or [BLANK_BLOCK], cache.block_tokens


Reader: TypeAlias = Span | Branch | SourceReader
"""Rows of the step that read the same KV: one entry of a group's batch."""


def branches_of(span: Span) -> Sequence[Reader]:
    """Split a span's rows into chains: a first child continues its parent's branch, other children start new ones."""
    if span.is_chain:
        return [span]
    above = {ROOT: list(range(span.root + 1))}
    chain = Branch(span, list(range(span.first_row, span.first_row + span.num_chain)), above[ROOT][:])
    branches, tips = [chain] if span.num_chain else [], {ROOT: chain} if span.num_chain else {}
    for node, parent in enumerate(span.parents):
        above[node] = [*above[parent], span.root + 1 + node]
        if node < span.num_cached_nodes:
            continue
        branch = tips.pop(parent, None)
        if branch is None:
            branch = Branch(span, [], above[parent][:])
            branches.append(branch)
        branch.rows.append(span.first_row + span.num_chain + node - span.num_cached_nodes)
        branch.seen.append(span.root + 1 + node)
        tips[node] = branch
    return branches


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For each node, a bitmask of its ancestors and itself."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append(1 << node | (0 if parent == ROOT else bits[parent]))
    return bits


def _ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """True where the column is the row's node or one of its ancestors.  # [N, N]"""
    num_nodes, num_bytes = len(parents), -(-len(parents) // 8)
    packed = np.frombuffer(b"".join(each.to_bytes(num_bytes, "little") for each in ancestor_bits(parents)), np.uint8)
    by_node = packed.reshape(num_nodes, num_bytes)
    return np.unpackbits(by_node, axis=1, count=num_nodes, bitorder="little").view(np.bool_)
