"""The shapes that steps are padded to; in deterministic mode the smallest in which a row's bits are independent of
others.

Knows settings and self-tests. Must not know how a step is run.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from workers.runtime.backend import BackendContext
from workers.runtime.backends import packed_weights
from workers.runtime.self_test import SelfTest
from workers.step import NO_TILING, Tiling

logger = logging.getLogger(__name__)

CPU_BFLOAT16 = Tiling(min_rows=4)
"""With fewer rows, a row's matrix products depend on the number of rows, and four rows cost what one does. In float32
four rows cost 1.5 times as much, for differences in the last bits alone; `deterministic` removes those."""

CPU_DETERMINISTIC = Tiling(min_rows=8, row_multiple=8, query_rows=4, kv_tokens=512, by_branch=True)
"""On a CPU torch's attention reads KV in blocks of 512, and its elementwise kernels treat the last elements of a tensor
differently if its size is no multiple of the vector width. A row's bits are independent of other rows with whole
blocks, multiples of eight rows, attention in products of four rows, and each branch of a tree read in the order of a
chain."""
GPU_DETERMINISTIC = Tiling(min_rows=2, by_branch=True)
"""On a GPU products and attention are computed in tiles of one shape. A single row would be compiled as a case of its
own."""
FEWER_ROWS = (1, 4)
"""Numbers of rows that may be enough where all weights are packed; a self-test at start decides."""


def choose_tiling(config: EngineConfig) -> Tiling:
    """The tiling of these settings. Raises: ConfigError for deterministic steps where they are not available."""
    on_cpu = torch.device(config.device).type == "cpu"
    if not config.deterministic:
        return CPU_BFLOAT16 if on_cpu and config.dtype == "bfloat16" and packed_weights.has_bfloat16() else NO_TILING
    if not on_cpu and not (config.compile and config.tensor_parallel == 1):
        raise ConfigError(f"deterministic on {config.device} needs compile: true and tensor_parallel: 1")
    if not on_cpu:
        return GPU_DETERMINISTIC
    if CPU_DETERMINISTIC.kv_tokens % config.block_tokens:
        raise ConfigError(
            f"deterministic needs block_tokens to divide {CPU_DETERMINISTIC.kv_tokens}, got {config.block_tokens}"
        )
    return CPU_DETERMINISTIC


def find_tile_rows(context: BackendContext, self_test: SelfTest) -> int | None:
    """The smallest number of rows of a tile with which a row's bits are independent of other rows; None without one.

    The context's tiling is that of the last number tried.
    """
    if context.cache.device.type != "cpu":
        return context.tiling.min_rows if self_test.has_equal_bits() else None
    is_packed = packed_weights.is_available(context.model.dtype, context.cache.device)
    fewer: tuple[int, ...] = FEWER_ROWS if is_packed else ()
    for num_rows in (*fewer, CPU_DETERMINISTIC.min_rows):
        context.tiling = tiles_of(num_rows, context.cache.device)
        if self_test.has_equal_bits():
            logger.info("deterministic steps are padded to a multiple of %d rows", num_rows)
            return num_rows
    return None


def tiles_of(num_rows: int, device: torch.device) -> Tiling:
    """Deterministic steps with `num_rows` rows to a tile."""
    if device.type != "cpu":
        return GPU_DETERMINISTIC
    return replace(CPU_DETERMINISTIC, min_rows=num_rows, row_multiple=num_rows)
