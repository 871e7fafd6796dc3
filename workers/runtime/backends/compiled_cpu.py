"""Backend for a CPU: runs steps by native code, compiled at this start or an earlier one.

Knows which library a step needs. Must not know how libraries are made (`workers.runtime.backends.native_library`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.config import EngineConfig
from workers.runtime.backend import Backend, BackendContext
from workers.runtime.backends import native_library, packed_weights
from workers.runtime.backends.native_library import MORE_ROWS, ONE_ROW, Run
from workers.runtime.backends.operators import operator_context
from workers.runtime.backends.program_cpu import is_prepared
from workers.step import Step


class CompiledBackend(Backend):
    """Runs compiled code that gives the model's logits up to the last bits.

    Not for tensor parallelism: tracing the model's code would need the other ranks in its collectives.
    """

    def __init__(self, context: BackendContext, below: Backend | None = None) -> None:
        super().__init__(context, below)
        self._products = packed_weights.packed(context.model)
        self._weights = native_library.weights_of(context.model)
        self._libraries: Mapping[str, Run] = {}

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return config.compile and torch.device(config.device).type == "cpu" and config.num_ranks == 1

    @classmethod
    def is_worth_building(cls, model: Any) -> bool:
        return not is_prepared(model)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        config = self.context.config
        least_rows = 1 if config.deterministic else self.context.tiling.min_rows  # the tile size is chosen later
        folder = Path(config.compile_cache).expanduser()
        self._libraries = native_library.build(self.context.model, self._weights, folder, least_rows, progress)

    def run(self, step: Step) -> Tensor:
        ids, positions, wanted = step.tensors(self.context.cache.device)
        plan = self.context.gathering(step.spans, len(step.ids))
        num_more = max(0, min(2, len(ids)) - len(wanted))
        if num_more:  # the library for several rows needs several wanted rows
            wanted = torch.cat([wanted, wanted.new_zeros(num_more)])
        run = self._libraries[ONE_ROW if len(ids) == 1 else MORE_ROWS]
        with operator_context(plan, self._products):
            logits: Tensor = run([ids, positions, wanted])[0]
        return logits
