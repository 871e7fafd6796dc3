"""Shapes that steps are padded to; in deterministic mode the smallest in which a row's bits do not depend on others.

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
"""With fewer rows, a row's matrix products depend on the number of rows; four rows cost as much as one. In float32,
four rows cost 1.5 times as much and only the last bits differ: there, only `deterministic` pads rows."""

CPU_DETERMINISTIC = Tiling(min_rows=8, row_multiple=8, query_rows=4, kv_tokens=512, by_branch=True)
"""On a CPU, torch's attention reads KV in blocks of 512, and its elementwise kernels treat the last elements of a
tensor differently if its size is no multiple of the vector width. A row's bits are independent of other rows with whole
blocks, multiples of eight rows, attention in products of four rows, and each branch of a tree read in the order of a
chain."""
GPU_DETERMINISTIC = Tiling(min_rows=2, by_branch=True)
"""On a GPU, products and attention are computed in tiles of one shape. A single row would be compiled as a special
case."""
FEWER_ROWS = (1, 4)
"""Smaller tiles, in rows, to try if all weights are packed; a self-test at start decides."""


def choose_tiling(config: EngineConfig) -> Tiling:
    """The tiling for these settings. Raises: ConfigError if they do not support `deterministic`."""
    on_cpu = torch.device(config.device).type == "cpu"
    if not config.deterministic:
        return CPU_BFLOAT16 if on_cpu and config.dtype == "bfloat16" and packed_weights.has_bfloat16() else NO_TILING
    if not on_cpu and not (config.compile and config.num_ranks == 1):
        raise ConfigError(f"deterministic on {config.device} needs compile: true and a single rank")
    if not on_cpu:
        return GPU_DETERMINISTIC
    if CPU_DETERMINISTIC.kv_tokens % config.block_tokens:
        raise ConfigError(
            f"deterministic needs block_tokens to divide {CPU_DETERMINISTIC.kv_tokens}, got {config.block_tokens}"
        )
    return CPU_DETERMINISTIC


def find_tile_rows(context: BackendContext, self_test: SelfTest) -> int | None:
    """Find the smallest tile, in rows, in which a row's bits are independent of other rows; None if there is none.

    Leaves the context with the last tiling tried.
    """
    if context.cache.device.type != "cpu":
        return context.tiling.min_rows if self_test.is_batch_invariant() else None
    is_packed = packed_weights.is_available(context.model.dtype, context.cache.device)
    fewer: tuple[int, ...] = FEWER_ROWS if is_packed else ()
    for num_rows in (*fewer, CPU_DETERMINISTIC.min_rows):
        context.tiling = tiles_of(num_rows, context.cache.device)
        if self_test.is_batch_invariant():
            logger.info("deterministic steps are padded to a multiple of %d rows", num_rows)
            return num_rows
    return None


def tiles_of(num_rows: int, device: torch.device) -> Tiling:
    """Deterministic tiling with tiles of `num_rows` rows."""
    if device.type != "cpu":
        return GPU_DETERMINISTIC
    return replace(CPU_DETERMINISTIC, min_rows=num_rows, row_multiple=num_rows)
