"""Backend for a CPU: the model's own code with packed weights (`workers.runtime.backends.packed_weights`).

Knows how much memory packing may take. Must not know how products are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from core.config import EngineConfig
from workers.model import ModelShard
from workers.runtime.backends import packed_weights
from workers.runtime.backends.eager import EagerBackend
from workers.runtime.backends.program_cpu import is_prepared
from workers.runtime.memory import GIB, free_bytes

logger = logging.getLogger(__name__)

WARM_UP_ROWS: Final = 64
"""Kernels are made at start for steps of up to this number of rows."""


class PackedBackend(EagerBackend):
    """Eager with packed weights. Without kernels or memory for them, weights stay as they are."""

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return torch.device(config.device).type == "cpu"

    @classmethod
    def prepare_weights(cls, model: Any, config: EngineConfig, shard: ModelShard | None = None) -> None:
        if is_prepared(model):
            return
        if not packed_weights.is_available(model.dtype, torch.device(config.device)):
            logger.warning(
                "this CPU has no kernels for packed %s weights: verifying several tokens takes longer", model.dtype
            )
            return
        keeps_rows = not config.deterministic  # a row must have the same bits whatever the other rows are
        if not _has_memory(model, config, 1 if shard is None else shard.num_local, keeps_rows=keeps_rows):
            return
        min_weights = 0 if config.deterministic else packed_weights.MIN_WEIGHTS
        by_tiles = config.deterministic and model.dtype == torch.bfloat16 and packed_weights.has_tile_unit()
        max_rows = packed_weights.TILE_UNIT_ROWS if by_tiles else None
        num_packed, num_left = packed_weights.pack(model, min_weights, keeps_rows=keeps_rows, max_rows=max_rows)
        logger.info("%d linear layers packed, %d left as they are", num_packed, num_left)

    def warm_up(self, progress: Callable[[str], None]) -> None:  # noqa: ARG002
        packed_weights.warm_up(self.context.model, WARM_UP_ROWS)


def _has_memory(model: Any, config: EngineConfig, num_local: int, *, keeps_rows: bool) -> bool:
    """Whether packing takes at most half of the free memory. Logs a warning if not."""
    needed = packed_weights.bytes_needed(model, keeps_rows=keeps_rows)
    free = free_bytes(torch.device(config.device), num_local)
    if not needed or free is None or needed <= free // 2:
        return True
    logger.warning(
        "%s weights are not widened, so verifying several tokens takes longer: that needs %.1f GiB, %.1f are free",
        *(model.dtype, needed / GIB, free / GIB),
    )
    return False
