"""Records the operations of a model's forward pass on a few rows: torch's operators, linear layers and attention.

Linear layers and attention are recorded as one operation each. Knows modules; must not know how operations are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from core.errors import UnsupportedModel
from workers.attention import LayerProbe
from workers.attention.paged import LayerKind
from workers.model import ModelShard

NUM_ROWS: Final = 17
NUM_WANTED: Final = 5
"""Rows of the example. Few tensors have a dimension of 17."""
Outputs: TypeAlias = tuple[Tensor, Sequence[Tensor]]
"""Logits of the wanted rows, and hidden states of all rows.  # [W, vocab], [T, hidden] each"""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator of torch."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True, slots=True)
class Product:
    """One call of a linear layer."""

    layer: Any
    rows: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """One call of attention.  # [1, H, T, D], [1, H_kv, T, D], [1, H_kv, T, D_v] -> [1, T, H, D_v]"""

    layer: int
    kind: LayerKind
    query: Tensor
    key: Tensor
    value: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One collective of the model's ranks: the sum of their parts, or all of them side by side."""

    part: Tensor
    result: Tensor
    is_sum: bool


@dataclass(slots=True)
class Recording(LayerProbe):
    """All operations of a forward pass, in order. It keeps their tensors, so that each has an identity."""

    operations: list[Operation | Product | Attended | Exchanged] = field(default_factory=list)
    ids: Tensor = field(default_factory=lambda: torch.zeros(NUM_ROWS, dtype=torch.int64))
    positions: Tensor = field(default_factory=lambda: torch.arange(NUM_ROWS))
    wanted: Tensor = field(default_factory=lambda: torch.arange(NUM_WANTED))
    given: Tensor | None = None
    """Rows that the caller brings.  # [T, width]"""
    logits: Tensor | None = None
    states: Sequence[Tensor] = ()
    """Hidden states of all rows, by tapped layer.  # [T, hidden] each"""
    num_ranks: int = 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: LayerKind, *, values_in_keys: bool = False
    ) -> Tensor:
        if values_in_keys:
            raise UnsupportedModel("its KV are latents")
        with _Pause():
            result = self.record(layer, query, key, value, kind.window)
        self.operations.append(Attended(layer, kind, query, key, value, result))
        return result

    # In place of the collectives of ranks

    exchange: ClassVar[None] = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._exchanged(tensor, 1, is_sum=True)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchanged(tensor, self.num_ranks, is_sum=False)

    def _exchanged(self, part: Tensor, times: int, *, is_sum: bool) -> Tensor:
        with _Pause():
            result = torch.cat([torch.zeros_like(part)] * times, dim=-1)
        self.operations.append(Exchanged(part, result, is_sum))
        return result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recording.operations.append(Operation(func, args, kwargs or {}, result))
        return result


_Pause = torch.utils._python_dispatch._disable_current_modes


@torch.no_grad()
def record(
    model: nn.Module, run: Callable[[Recording], Outputs], given_width: int = 0, shard: ModelShard | None = None
) -> Recording:
    """Record what `run` computes of NUM_ROWS rows, whose callers bring `given_width` numbers for each."""
    dtype = next(model.parameters()).dtype
    recording = Recording(
        given=torch.zeros(NUM_ROWS, given_width, dtype=dtype) if given_width else None,
        num_ranks=1 if shard is None else shard.size,
    )
    with _linear_layers(model, recording), _collectives(shard, recording), _Recorder(recording):
        recording.logits, recording.states = run(recording)
    return recording


@contextmanager
def _linear_layers(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Make linear layers record themselves within the `with` block."""
    layers = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    own = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = _Recorded(layer, recording)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


@contextmanager
def _collectives(shard: ModelShard | None, recording: Recording) -> Iterator[None]:
    """Make collectives record themselves within the `with` block: no other rank is waited for."""
    if shard is None:
        yield
        return
    own = shard.collectives
    shard.connect(recording)
    try:
        yield
    finally:
        shard.connect(own)


@dataclass(frozen=True, slots=True)
class _Recorded:
    layer: Any
    recording: Recording

    def __call__(self, rows: Tensor) -> Tensor:
        with _Pause():
            num_outputs = self.layer.weight.shape[int(isinstance(self.layer, Conv1D))]  # a rank may have few of them
            result = rows.new_zeros(*rows.shape[:-1], num_outputs)
        self.recording.operations.append(Product(self.layer, rows, result))
        return result


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in lists and tuples, however deep."""
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in tensors_in(value)] if isinstance(values, (list, tuple)) else []
