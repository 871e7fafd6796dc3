"""An EAGLE head as a program of native code, in place of torch's operators, which cost more than its numbers.

Knows heads and steps; must not know sequences or messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.config import EngineConfig
from workers.heads import EagleHead, HeadWithKV
from workers.runtime.backends.program_cpu import ProgramBackend, native_code_of
from workers.step import KVCache, Step

if TYPE_CHECKING:
    from workers.runtime.program.preparation import NativeCode
    from workers.runtime.program.recorder import Outputs, Recording


class NativeHead:
    """Computes what `EagleHead.forward` and `EagleHead.scores` do."""

    def __init__(self, native: NativeCode, cache: KVCache, max_context_tokens: int) -> None:
        from workers.runtime.program.execution import Execution

        assert native.program is not None
        self.num_threads = native.team.num_threads
        self._execution = Execution(native.program, cache, native.team, max_context_tokens)
        self._dtype = cache.keys[-1].dtype

    def run(self, step: Step, features: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all rows, and scores of the wanted ones.  # [T, hidden], [W, draft vocab]"""
        logits, (outputs,) = self._execution.run(step, features)
        return torch.from_numpy(outputs).to(self._dtype), torch.from_numpy(logits).clone()


def native_code_of_head(head: HeadWithKV, config: EngineConfig) -> NativeCode | None:
    """A program of the head, with its weights packed. None where its own code is run, as for MTP layers; else the log
    says why."""
    if not isinstance(head, EagleHead) or not ProgramBackend.supports(config):
        return None

    def run(step: Recording) -> Outputs:
        assert step.given is not None
        outputs = head(step.ids, step.positions, step.given, step)
        return head.scores(outputs[step.wanted]), [outputs]

    native = native_code_of(head, run, head.output, config, head.config.hidden_size)
    return native if native is not None and native.program is not None else None
