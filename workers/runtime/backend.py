"""Interface between the runtime and the ways to run a forward pass.

`workers.runtime.backends` lists the implementations; `workers.runtime.backend_stack` chooses and warms them up. Knows
what a step is and how a model is called. Must not know sequences, sampling or any single backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from core.config import EngineConfig
from workers.attention import Kernel, PagedPlan
from workers.model import ModelShard
from workers.runtime.features import tap_of
from workers.step import KVCache, Span, Step, StepPlan, Tiling, plan_step

Plan: TypeAlias = StepPlan | PagedPlan


class BackendUnavailable(Exception):
    """A backend cannot run this model on this machine; the message says why."""


@dataclass(slots=True)
class BackendContext:
    """Everything that a backend is built from: one model on one device, and its KV."""

    model: Any
    """A transformers PreTrainedModel that calls `workers.attention`."""
    cache: KVCache
    kernel: Kernel | None
    """Attention that reads KV by block tables; None if KV is gathered."""
    config: EngineConfig
    max_context_tokens: int
    tiling: Tiling
    """Shapes that steps are padded to. The warm-up may change its `min_rows` and `row_multiple`."""
    shard: ModelShard | None = None
    """The part of the model that this rank has; None if it is whole."""

    @property
    def row_width(self) -> int:
        """Numbers in a row of logits, with its features."""
        tap = tap_of(self.model)
        width: int = self.model.config.vocab_size
        return width if tap is None else width + len(tap.layers) * self.model.config.hidden_size

    def gathering(self, spans: Sequence[Span], num_rows: int) -> StepPlan:
        """Plan a step with these spans for attention that gathers KV."""
        return plan_step(self.cache, spans, num_rows, self.tiling)


class Backend(ABC):
    """One way to run a forward pass.

    A runtime has a stack of backends, fastest first. Each step goes to the first of them that runs it; the last one
    runs every step.
    """

    is_compiled: ClassVar[bool] = True
    """True for a backend that the warm-up builds. It is used only if it gives the logits of the backend below it, and
    steps that it does not run count as eager. False for a backend that runs every step from the start."""
    is_bit_exact: ClassVar[bool] = False
    """True for a backend that runs the operators of the one below it in the same order. Its logits must be equal bit
    for bit, so that building it changes nothing but time."""

    has_shapes: ClassVar[bool] = True
    """False for a backend that computes a row in the same way whatever the step's shape: a brief test is enough."""

    def __init__(self, context: BackendContext, below: Backend | None = None) -> None:
        """`below` is the next slower backend that has been built; None for the base."""
        self.context = context
        self.below = below

    @classmethod
    @abstractmethod
    def supports(cls, config: EngineConfig) -> bool:
        """Whether this backend supports these settings, including their device and number of ranks."""

    @classmethod
    def is_worth_building(cls, model: Any) -> bool:  # noqa: ARG003
        """Whether this model's steps gain enough to be worth the time of building."""
        return True

    @classmethod  # noqa: B027  most leave weights as they are
    def prepare_weights(cls, model: Any, config: EngineConfig, shard: ModelShard | None = None) -> None:
        """Lay out the weights for this backend. Called once, before KV takes the remaining memory.

        `shard`: the part of the model that this rank has; None if it is whole.
        """

    def warm_up(self, progress: Callable[[str], None]) -> None:  # noqa: B027  some have nothing to do
        """Build everything that steps need, so that no request pays for it.

        All ranks of a model do this together. Raises: BackendUnavailable.
        """

    def due(self, *, is_idle: bool) -> int | None:  # noqa: ARG002  most build all at start
        """The number of a part that the warm-up left out, to be built now, between two steps; None if none is due.

        Each part is due once. `is_idle`: no step waits.
        """
        return None

    def build_part(self, part: int) -> Callable[[], None]:
        """Build this part, on all ranks of a model. Returns a function that puts it to use, if all could build theirs.

        Raises: BackendUnavailable; steps then run as before.
        """
        raise NotImplementedError

    @abstractmethod
    def run(self, step: Step) -> Tensor | None:
        """Write the step's KV. Returns logits of its wanted rows, then maybe of others.  # [rows or more, vocab]

        Returns None, and writes nothing, for a step that this backend does not run.
        """

    def logits(self, ids: Tensor, positions: Tensor, wanted: Tensor, plan: Plan) -> Tensor:
        """Logits of the `wanted` rows; a faster backend records this call.  # [T], [T], [W] -> [W, vocab]"""
        return model_logits(self.context.model, ids, positions, wanted, plan)


class LogitsModule(nn.Module):
    """The model's forward over a step's tensors, to be recorded. Attention is then an operator and needs no plan."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        return model_logits(self.model, ids, positions, wanted, None)


def model_logits(model: Any, ids: Tensor, positions: Tensor, wanted: Tensor, plan: Plan | None) -> Tensor:
    """Logits of the `wanted` rows from the model's own code, each followed by the row's features if any are tapped.

    # [T], [T], [W] -> [W, vocab + features]
    """
    logits, states = model_outputs(model, ids, positions, wanted, plan)
    return torch.cat([logits, *(state[wanted].to(logits.dtype) for state in states)], dim=-1) if states else logits


def model_outputs(
    model: Any, ids: Tensor, positions: Tensor, wanted: Tensor, plan: Plan | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """Logits of the `wanted` rows, and all rows' hidden states of each tapped layer.  # [W, vocab], [T, hidden]"""
    output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted, plan=plan)
    tap = tap_of(model)
    return output.logits[0], () if tap is None else tap.take()
