"""Backend for a CPU: the model's operations, recorded at start, run as one program of native code.

One call runs a whole step: products at the memory's pace, what is between them row by row in the cache, and attention
over the KV blocks in place. Numba compiles it, so no C++ compiler is needed (adr/cpu-runtime).

Knows what is prepared when. Must not know operations (`workers.runtime.program`) or instructions (`workers.native`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.config import EngineConfig
from core.errors import StartupError, first_line
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable
from workers.step import Step

if TYPE_CHECKING:
    from workers.native.team import Team
    from workers.runtime.program.assembly import Program

logger = logging.getLogger(__name__)
_PREPARED = "outrider_program"
"""Attribute of a model whose weights are packed for native code."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    program: Program | None
    team: Team


def is_prepared(model: Any) -> bool:
    """Whether the model's linear layers are native code."""
    return hasattr(model, _PREPARED)


class ProgramBackend(Backend):
    """Runs every step as a program. A model with operations that no program expresses is run by its own code."""

    has_shapes: ClassVar[bool] = False

    def __init__(self, context: BackendContext, below: Backend | None = None) -> None:
        super().__init__(context, below)
        self._program: Program | None = getattr(context.model, _PREPARED).program
        self.team: Team = getattr(context.model, _PREPARED).team

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return torch.device(config.device).type == "cpu" and config.tensor_parallel == 1

    @classmethod
    def is_worth_building(cls, model: Any) -> bool:
        return is_prepared(model) and getattr(model, _PREPARED).program is not None

    @classmethod
    def prepare_weights(cls, model: Any, config: EngineConfig) -> None:
        try:
            _prepare(model, config)
        except Exception as error:  # of the model's code, of torch or of the compiler
            if config.quantize is not None:
                raise StartupError(f"{config.model} cannot be quantized here: {first_line(error)}") from error
            logger.info("%s is run by its own code: %s", type(model).__name__, first_line(error))

    def warm_up(self, progress: Callable[[str], None]) -> None:
        from workers.runtime.program.execution import Execution

        program = self._program
        if program is None:
            raise BackendUnavailable("its operations are not recorded")
        self._execution = Execution(program, self.context.cache, self.team, self.context.max_context_tokens)
        progress(f"a step is a program of {len(program.codes)} operations, run by {self.team.num_threads} threads")

    def run(self, step: Step) -> Tensor:
        return self._execution.run(step)


@torch.no_grad()
def _prepare(model: Any, config: EngineConfig) -> None:
    """Record the model, then pack its weights. Changes nothing if that fails."""
    began_s = monotonic()
    from workers.native.matrix import Matrix  # the first import on a machine compiles for some ten seconds
    from workers.native.pages import Pages
    from workers.native.product import NativeProduct
    from workers.native.team import Team
    from workers.runtime.program.assembly import Assembler
    from workers.runtime.program.recorder import record

    if (took_s := monotonic() - began_s) > 1:
        logger.info("native code of linear layers and attention compiled in %.0f s, and kept", took_s)
    matrices: dict[Any, Matrix] = {}

    def matrix_of(layer: Any) -> Matrix:
        if layer not in matrices:
            num_outputs, num_inputs = _weight(layer).shape
            quantized = None if layer is model.get_output_embeddings() else config.quantize
            matrices[layer] = Matrix(num_outputs, num_inputs, layer.weight.dtype, quantized)
        return matrices[layer]

    try:
        program: Program | None = Assembler(record(model), matrix_of).program()
    except Exception as error:
        if config.quantize is None:
            raise
        logger.info("%s is run by its own code, with quantized products: %s", type(model).__name__, first_line(error))
        program = None
    team, pages = Team(config.num_threads), Pages()
    for layer in [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]:
        matrix = matrix_of(layer)
        matrix.pack(_weight(layer), layer.bias, pages)
        layer.forward = NativeProduct(matrix, team)
        placeholder = layer.weight.new_full((1, 1), torch.nan).expand_as(layer.weight)
        layer.weight = nn.Parameter(placeholder, requires_grad=False)
    setattr(model, _PREPARED, _Prepared(program, team))


def _weight(layer: Any) -> Tensor:
    """# [out, in]"""
    weight: Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight
