"""Attention masks of a group's rows, as a bias on their scores: 0 for a visible slot, -inf for any other.

Knows positions and slots; must not know KV or arithmetic. In a chain, visibility depends only on the distance between
two slots, so the bias of a row is a slice of one cached table. The bias of a tree is computed slot by slot.
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
"""(B, R, L): B attention products in one call, with R query rows and L slots each."""
MAX_TABLES = 64
"""Number of cached tables: one for each power of two slots, window and dtype."""


@dataclass(frozen=True, slots=True)
class ChainMask:
    """Each row sees the slots up to its own."""

    shape: Shape
    positions: list[int]  # [B*R] the rows' own slots

    def distances(self) -> NDArray[np.int64]:
        """Number of positions from each slot up to each row; not negative where the slot is visible.  # [B, R, L]"""
        num_products, num_queries, num_slots = self.shape
        return np.array(self.positions).reshape(num_products, num_queries, 1) - np.arange(num_slots)

    def bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Bias for layers with this window. For one row, heads may share it.  # [B, 1, R*G, L] or [1, 1, 1, L]"""
        num_products, _, num_slots = self.shape
        span = 1 << (num_slots - 1).bit_length()
        stretches = _by_distance(span, window, dtype, device).unfold(0, num_slots, 1)
        if len(self.positions) == 1 and device.type == "cpu":  # GPU kernels need aligned masks
            return stretches[span - self.positions[0]].view(1, 1, 1, num_slots)
        firsts = [span - position for position in self.positions for _ in range(heads_per_row)]
        return stretches.index_select(0, upload(firsts, device)).view(num_products, 1, -1, num_slots)


@lru_cache(MAX_TABLES)
def _by_distance(span: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bias by a slot's distance from the row's own slot; element `span` is distance 0.  # [2*span]"""
    distance = torch.arange(-span, span, device=device)
    is_hidden = distance > 0 if window is None else (distance > 0) | (distance <= -window)
    return torch.zeros(2 * span, dtype=dtype, device=device).masked_fill_(is_hidden, -math.inf)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Each row sees the slots marked for it. Windows compare positions; a node's position follows from its depth."""

    visible: NDArray[np.bool_]  # [B, R, L]
    query_positions: NDArray[np.int64]  # [B, R]
    key_positions: NDArray[np.int64]  # [B, L], or [1, L] for tiles of one tree

    @property
    def shape(self) -> Shape:
        num_products, num_queries, num_slots = self.visible.shape
        return num_products, num_queries, num_slots

    def distances(self) -> NDArray[np.int64]:
        """Like `ChainMask.distances`."""
        return self.query_positions[:, :, None] - self.key_positions[:, None, :]

    def bias(self, window: int | None, heads_per_row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Bias for layers with this window.  # [B, 1, R*G, L]"""
        visible = self.visible
        if window is not None:
            visible = visible & (self.distances() < window)
        hidden = upload(np.repeat(~visible, heads_per_row, axis=1)[:, None], device)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


Mask: TypeAlias = ChainMask | TreeMask


def mask_of(readers: Sequence[Reader], num_queries: int, num_slots: int, tile: int) -> Mask:
    """Mask of these readers, each padded to `num_queries` rows and cut into tiles of `tile` rows.

    Padding rows see all of the reader's slots: their outputs are dropped, but every row has to see a slot.
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
    """Slot of each row, as if all rows were a chain."""
    num_padding = num_queries - reader.num_rows
    return reader.last_slots if not num_padding else [*reader.last_slots, *[reader.num_kv - 1] * num_padding]
