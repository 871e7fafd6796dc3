"""Backend for a GPU: each layer of the model compiled by inductor, with attention as an operator of its own.

A layer launches forty kernels. Most are norms, rotary embeddings and activations that read and write a few rows;
compiled, they become a handful. All layers share their code, because a layer's number is not compiled in. Two
compilations, for a single row and for any other number of rows, serve every step, including CUDA graphs.

Knows models and torch's compiler. Must not know what the rows stand for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

import torch
from torch import Tensor, nn

from core.config import EngineConfig
from workers.attention import number_layers, paged_inputs
from workers.model import ModelShard, layer_list, probe_layers
from workers.products import fuse_projections, use_tiles
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable, Plan, model_logits
from workers.runtime.backends.operators import operator_context
from workers.step import Step, StepRows, flatten

NUM_ROWS = (1, 8)
"""Rows of the steps compiled at start. A single row is compiled as a special case; all other numbers share one."""


OPTIONS: Final[dict[str, Any]] = {"combo_kernels": True, "deterministic": True}
"""Independent small kernels are fused. None is chosen by timing, which would change bits from start to start."""


class CompiledLayersBackend(Backend):
    """Runs every step by compiled layers. Sums over ranks are operators in them.

    Not for stages, which exchange states in hooks of their first and last layers.
    """

    def __init__(self, context: BackendContext, below: Backend | None = None) -> None:
        super().__init__(context, below)
        _, layers = layer_list(context.model)
        number_layers(context.model)
        self._layers = [*layers, *_last_norms(context.model, layers)]
        self._compiled = [
            torch.compile(layer._call_impl, dynamic=True, fullgraph=True, options=OPTIONS) for layer in self._layers
        ]

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return config.compile and torch.device(config.device).type != "cpu" and config.pipeline_parallel == 1

    @classmethod
    def prepare_weights(cls, model: Any, config: EngineConfig, shard: ModelShard | None = None) -> None:  # noqa: ARG003
        fuse_projections(model, lambda: probe_layers(model, model.config), is_tiled=config.deterministic)
        use_tiles(model, is_tiled=config.deterministic)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Compile all layers. Raises: BackendUnavailable for model code that cannot be compiled in one piece."""
        if self.context.kernel is None:
            raise BackendUnavailable("its attention gathers KV, whose shapes change from step to step")
        progress(f"compiling {len(self._layers)} layers")
        began_s = monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's warnings about its own code
                for num_rows in NUM_ROWS:
                    self._compile_for(num_rows)
        except Exception as error:  # torch's compiler raises many kinds, and model code any
            raise BackendUnavailable(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        progress(f"compiled {len(self._layers)} layers in {monotonic() - began_s:.0f} s")

    def run(self, step: Step) -> Tensor:
        context = self.context
        assert context.kernel is not None, "without a kernel nothing is compiled"
        return self.logits(*paged_inputs(step, context.cache, context.kernel, context.tiling))

    def logits(self, ids: Tensor, positions: Tensor, wanted: Tensor, plan: Plan) -> Tensor:
        with operator_context(plan, (), self.context.shard), self._in_place():
            return model_logits(self.context.model, ids, positions, wanted, None)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Make the model call its compiled layers within the `with` block."""
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer._compiled_call_impl = compiled
        try:
            yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None

    def _compile_for(self, num_rows: int) -> None:
        cache = self.context.cache
        kv = cache.new_sequence()
        try:
            rows = StepRows(kv, [0] * num_rows)
            cache.reserve(kv, num_rows)
            self.run(flatten([rows]))
        finally:
            cache.free(kv)


def _last_norms(model: Any, layers: nn.ModuleList) -> list[Any]:
    """Modules with weights between the layers and the output, except torch's own, which are one kernel each."""
    owner = next(module for module in model.modules() if any(child is layers for child in module.children()))
    return [
        child
        for child in owner.children()
        if child is not layers
        and any(True for _ in child.parameters())
        and not type(child).__module__.startswith("torch.")
    ]
