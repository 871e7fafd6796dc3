"""Backend for a CPU: the model's operations, recorded at start, run as one program of native code.

One call runs a whole step: products at the memory's pace, what is between them row by row in the cache, and attention
over the KV blocks in place. Numba compiles it, so no C++ compiler is needed (adr/cpu-runtime).

Knows what is prepared when. Must not know operations (`workers.runtime.program`) or instructions (`workers.native`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import StartupError, first_line
from workers.model import ModelShard
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable, model_outputs
from workers.step import Step

if TYPE_CHECKING:
    from workers.native.team import Team
    from workers.runtime.program.preparation import NativeCode
    from workers.runtime.program.program import Program
    from workers.runtime.program.recorder import Outputs, Recording

logger = logging.getLogger(__name__)
_PREPARED = "outrider_program"
"""Attribute of a model whose weights are packed for native code."""
COMPILED_S: Final = 1
"""An import of native code that takes longer has compiled it."""


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
        is_whole = config.pipeline_parallel == 1  # a program does not exchange states with other stages
        return is_whole and torch.device(config.device).type == "cpu"

    @classmethod
    def is_worth_building(cls, model: Any) -> bool:
        return is_prepared(model) and getattr(model, _PREPARED).program is not None

    @classmethod
    def prepare_weights(cls, model: Any, config: EngineConfig, shard: ModelShard | None = None) -> None:
        def run(step: Recording) -> Outputs:
            return model_outputs(model, step.ids, step.positions, step.wanted, step)  # type: ignore[arg-type]  # a probe

        native = native_code_of(model, run, model.get_output_embeddings(), config, shard=shard)
        if native is not None:
            setattr(model, _PREPARED, native)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        from workers.runtime.program.execution import Execution

        program = self._program
        if program is None:
            raise BackendUnavailable("its operations are not recorded")
        max_tokens, exchange = self.context.max_context_tokens, getattr(self.context.model, _PREPARED).exchange
        self._execution = Execution(program, self.context.cache, self.team, max_tokens, exchange)
        progress(f"a step is a program of {len(program.codes)} operations, run by {self.team.num_threads} threads")

    def run(self, step: Step) -> Tensor:
        logits, states = self._execution.run(step)
        return torch.from_numpy(np.concatenate([logits, *(state[step.asked] for state in states)], axis=1))


def native_code_of(
    model: Any, run: Callable[[Recording], Outputs], output: Any, config: EngineConfig, given_width: int = 0,
    shard: ModelShard | None = None,
) -> NativeCode | None:  # fmt: skip
    """Make a program of what `run` computes, and pack the model's linear layers. None if the model stays as it is; the
    log says why.

    `output` is the output layer, which is not quantized. `given_width`: numbers of a row that callers bring. `shard`:
    the part of the model that this rank has, if it is not whole. Raises: StartupError if weights cannot be quantized.
    """
    began_s = monotonic()
    try:
        from workers.runtime.program import preparation

        if (took_s := monotonic() - began_s) > COMPILED_S:
            logger.info("native code of linear layers and attention compiled in %.0f s, and kept", took_s)
        return preparation.prepare(model, run, output, config, given_width, shard)
    except Exception as error:  # of the model's code, of torch or of the compiler
        if config.quantize is not None:
            raise StartupError(f"{config.model} cannot be quantized here: {first_line(error)}") from error
        logger.info("%s is run by its own code: %s", type(model).__name__, first_line(error))
        return None
