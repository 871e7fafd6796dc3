"""Records the operations of a model's forward pass on a few rows: torch's operators, linear layers and attention.

Linear layers and attention are recorded as one operation each. Knows modules; must not know how operations are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from core.errors import UnsupportedModel
from workers.attention import LayerProbe
from workers.attention.paged import LayerKind
from workers.runtime.backend import model_outputs

NUM_ROWS: Final = 17
NUM_WANTED: Final = 5
"""Rows of the example. Few tensors have a dimension of 17."""


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


@dataclass(slots=True)
class Recording(LayerProbe):
    """All operations of a forward pass, in order. It keeps their tensors, so that each has an identity."""

    operations: list[Operation | Product | Attended] = field(default_factory=list)
    ids: Tensor = field(default_factory=lambda: torch.zeros(NUM_ROWS, dtype=torch.int64))
    positions: Tensor = field(default_factory=lambda: torch.arange(NUM_ROWS))
    wanted: Tensor = field(default_factory=lambda: torch.arange(NUM_WANTED))
    logits: Tensor | None = None
    states: Sequence[Tensor] = ()
    """Hidden states of all rows, by tapped layer.  # [T, hidden] each"""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: LayerKind, *, values_in_keys: bool = False
    ) -> Tensor:
        if values_in_keys:
            raise UnsupportedModel("its KV are latents")
        with _Pause():
            result = self.record(layer, query, key, value, kind.window)
        self.operations.append(Attended(layer, kind, query, key, value, result))
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
def record(model: Any) -> Recording:
    """Record a forward pass of NUM_ROWS rows."""
    recording = Recording()
    with _linear_layers(model, recording), _Recorder(recording):
        recording.logits, recording.states = model_outputs(
            model,
            recording.ids,
            recording.positions,
            recording.wanted,
            recording,  # type: ignore[arg-type]  # a probe
        )
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


@dataclass(frozen=True, slots=True)
class _Recorded:
    layer: Any
    recording: Recording

    def __call__(self, rows: Tensor) -> Tensor:
        with _Pause():
            num_outputs = self.layer.nf if isinstance(self.layer, Conv1D) else self.layer.out_features
            result = rows.new_zeros(*rows.shape[:-1], num_outputs)
        self.recording.operations.append(Product(self.layer, rows, result))
        return result
