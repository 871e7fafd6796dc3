"""Keys and values in 8 bits (float8 e4m3): how rows are stored, and how they are read again.

A number is rounded by itself, without scales: it has the same bits whatever is stored beside it. Knows tensors; must
not know layers. Source: Micikevicius et al. 2022 (arXiv 2209.05433), section 3.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from core.config import EngineConfig

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest number; there is no infinity."""


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of a model's keys and values; the model's own is `dtype`."""
    return FP8 if config.kv_dtype == "fp8" else dtype


def as_bits(pool: Tensor) -> Tensor:
    """A view for copies: torch copies and erases bytes on every device, but not float8."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def as_stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as they are stored. Larger numbers become the largest; infinite ones become NaN and so stay an error."""
    if dtype != FP8:
        return rows
    wide = rows.float()
    return wide.clamp(-FP8_MAX, FP8_MAX).masked_fill(wide.isinf(), torch.nan).to(FP8)


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [1, H, T, D] to their slots of a pool [1, H, S, D]."""
    as_bits(pool).index_copy_(2, slots, as_bits(as_stored(rows, pool.dtype)))
