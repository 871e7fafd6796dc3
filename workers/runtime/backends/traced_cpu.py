"""Backend for a CPU: records the operators of the model's own code at start, and runs them without that code.

Almost half of a small model's pass is Python between operators: module calls, keyword arguments, shapes.
`torch.jit.trace` records the operators once, and torch's interpreter runs them in the same order, so logits have the
same bits. Recording takes a tenth of a second and needs no compiler (adr/cpu-runtime).

Knows models and torch's tracer. Must not know what the rows stand for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import first_line
from core.speculation import TokenTree
from workers.model import quiet_transformers
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable, LogitsModule
from workers.runtime.backends import packed_weights
from workers.runtime.backends.operators import operator_context
from workers.runtime.backends.program_cpu import is_prepared
from workers.step import Step, StepRows, flatten

_JIT: Any = torch.jit  # it has no types
Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ids, positions, wanted rows) -> logits."""
MAX_WEIGHTS: Final = 1 << 26
"""Largest number of weights of a model that is traced. With more, the self-test at start takes seconds."""


class TracedBackend(Backend):
    """Runs the recorded operators of the model's code.

    Not for tensor parallelism: recording would need the other ranks in its collectives.
    """

    is_bit_exact: ClassVar[bool] = True

    def __init__(self, context: BackendContext, below: Backend | None = None) -> None:
        super().__init__(context, below)
        self._products = packed_weights.packed(context.model)

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return not config.compile and torch.device(config.device).type == "cpu" and config.num_ranks == 1

    @classmethod
    def is_worth_building(cls, model: Any) -> bool:
        num_weights: int = sum(weight.numel() for weight in model.parameters())
        return num_weights <= MAX_WEIGHTS and not is_prepared(model)

    def warm_up(self, progress: Callable[[str], None]) -> None:  # noqa: ARG002
        """Record the model's code. Raises: BackendUnavailable if the code depends on computed values."""
        cache = self.context.cache
        kv = cache.new_sequence()
        try:
            example = StepRows(kv, [0] * 5, TokenTree.chain((0, 0, 0)))  # 8 rows, of which 4 are wanted
            cache.reserve(kv, example.num_rows)
            self.recorded = self._record(flatten([example]))
        finally:
            cache.free(kv)

    def run(self, step: Step) -> Tensor:
        plan = self.context.gathering(step.spans, len(step.ids))
        with operator_context(plan, self._products):
            return self.recorded(*step.tensors(self.context.cache.device))

    def _record(self, example: Step) -> Run:
        module = LogitsModule(self.context.model).eval()
        plan = self.context.gathering(example.spans, len(example.ids))
        try:
            with (
                torch.no_grad(),
                quiet_transformers(),
                warnings.catch_warnings(),
                operator_context(plan, self._products),
            ):
                warnings.simplefilter("ignore")  # the tracer is deprecated; without it the model's code would run
                warnings.simplefilter("error", _JIT.TracerWarning)  # the trace would hold for this example only
                _JIT.TracerWarning.ignore_lib_warnings()  # torch's own code reads the shapes of weights
                traced = _JIT.trace(module, example.tensors(self.context.cache.device), check_trace=False)
                run: Run = _JIT.freeze(traced, optimize_numerics=False)
        except Exception as error:  # torch raises many kinds, and model code any
            raise BackendUnavailable(first_line(error)) from error
        return run
