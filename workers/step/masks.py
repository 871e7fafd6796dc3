"""Which slots the rows of a group see, as a bias on their scores: 0 for a slot that is seen, -inf for any other.

Knows positions and slots; must not know KV or arithmetic. What a chain's row sees depends only on how far a slot is
from its own, so its bias is a stretch of one table that is made once. The bias of a tree is made slot by slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from workers.step.readers import Reader, Span
from workers.step.transfer import upload

Shape: TypeAlias = tuple[int, int, int]
"""Of attention products in one call: B of them, with R query rows and L slots each."""
MAX_TABLES = 64
"""Number of tables kept: one for each power of two slots, window and dtype."""


@dataclass(frozen=True, slots=True)
class ChainMask:
    """Each row sees the slots up to its own."""

    shape: Shape
    positions: list[int]  # [B*R] the rows' own slots

    def bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For layers with this window; with one row, all heads may share a bias.  # [B, 1, R*G, L] or [1, 1, 1, L]"""
        num_products, _, num_slots = self.shape
        span = 1 << (num_slots - 1).bit_length()
        stretches = _by_distance(span, window, dtype, device).unfold(0, num_slots, 1)
        if len(self.positions) == 1 and device.type == "cpu":  # kernels of GPUs read masks in aligned pieces
            return stretches[span - self.positions[0]].view(1, 1, 1, num_slots)
        firsts = [span - position for position in self.positions for _ in range(heads_per_row)]
        return stretches.index_select(0, upload(firsts, device)).view(num_products, 1, -1, num_slots)


@lru_cache(MAX_TABLES)
def _by_distance(span: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The bias of each slot by its distance from the row's own, which is element `span`.  # [2*span]"""
    distance = torch.arange(-span, span, device=device)
    is_hidden = distance > 0 if window is None else (distance > 0) | (distance <= -window)
    return torch.zeros(2 * span, dtype=dtype, device=device).masked_fill_(is_hidden, -math.inf)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Each row sees what is marked; windows compare positions, which are depths in a tree."""

    visible: NDArray[np.bool_]  # [B, R, L]
    query_positions: NDArray[np.int64]  # [B, R]
    key_positions: NDArray[np.int64]  # [B, L], or [1, L] for tiles of one tree

    @property
    def shape(self) -> Shape:
        num_products, num_queries, num_slots = self.visible.shape
        return num_products, num_queries, num_slots

    def bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For layers with this window.  # [B, 1, R*G, L]"""
        visible = self.visible
        if window is not None:
            visible = visible & (self.query_positions[:, :, None] - self.key_positions[:, None, :] < window)
        hidden = upload(np.repeat(~visible, heads_per_row, axis=1)[:, None], device)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


Mask: TypeAlias = ChainMask | TreeMask
"""What each row of a group sees."""


def mask_of(readers: Sequence[Reader], num_queries: int, num_slots: int, tile: int) -> Mask:
    """What the rows of these readers see, each padded to `num_queries` rows, which are cut into tiles.

    Padding sees what a reader's last row in a chain does: its outputs are dropped, but each row has to see a slot.
    """
    positions = [_positions(reader, num_queries) for reader in readers]
    if all(reader.is_chain for reader in readers):
        shape = (len(readers) * num_queries // tile, tile, num_slots)
        return ChainMask(shape, [position for of_reader in positions for position in of_reader])
    query_positions = np.array(positions)
    key_positions = np.arange(num_slots)[None].repeat(len(readers), axis=0)
    visible = key_positions[:, None] <= query_positions[:, :, None]
    for reader, *parts in zip(readers, visible, query_positions, key_positions, strict=True):
        if isinstance(reader, Span) and not reader.is_chain:
            reader.mask_tree(*parts)
    return TreeMask(visible.reshape(-1, tile, num_slots), query_positions.reshape(-1, tile), key_positions)


def _positions(reader: Reader, num_queries: int) -> Sequence[int]:
    """The slot of each row, were they all a chain."""
    num_rows = reader.num_rows
    slots = range(reader.num_kv - num_rows, reader.num_kv)
    return slots if num_rows == num_queries else [*slots, *[reader.num_kv - 1] * (num_queries - num_rows)]
