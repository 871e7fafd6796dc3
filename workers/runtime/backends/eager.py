"""Backend that calls the model's own code, operator by operator. Runs every step on every device."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from core.config import EngineConfig
from workers.attention import paged_inputs
from workers.runtime.backend import Backend, model_logits
from workers.step import Step


class EagerBackend(Backend):
    is_compiled: ClassVar[bool] = False

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:  # noqa: ARG003
        return True

    def run(self, step: Step) -> Tensor:
        context = self.context
        if context.kernel is None:
            plan = context.gathering(step.spans, len(step.ids))
            return model_logits(context.model, *step.tensors(context.cache.device), plan)
        inputs = paged_inputs(step, context.cache, context.kernel, context.tiling)
        return model_logits(context.model, *inputs)
