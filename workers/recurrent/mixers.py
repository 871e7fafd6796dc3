"""Finds a model's recurrent mixers: modules that keep a state in transformers' cache (Mamba, gated delta nets, short
convolutions). A short run of each, with its own weights, shows what it stores and how it may be called.

Knows modules and the methods by which they use a cache; no code depends on a class. Must not know sequences or passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import expm1, inf, log
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from core.errors import UnsupportedModel, cause
from workers.recurrent.call_states import CallStates, StateName

STATE_CALLS = frozenset({"update_conv_state", "update_recurrent_state"})
"""Methods of transformers' cache that store a state. The code of a mixer calls one of them."""
CACHE_ARGUMENTS = ("cache_params", "past_key_values")
TRIAL_TOKENS = 8
TRIAL_CUT = 3
"""A trial of chunks has a chunk of this number of tokens, and one of the rest."""
EXP_LIMIT = 20.0
"""Above it softplus is the identity, as in torch."""
ALLOWED_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.06}
"""Allowed difference between ways to compute the same rows, relative to the largest output of a mixer."""

WEIGHT_IS_READ = "outrider_weight_is_read"
"""Attribute of a linear layer whose weight is read by other code than its forward, so that it must stay in place."""

Call: TypeAlias = Callable[[Tensor, CallStates], Tensor]
"""Runs a mixer on rows [B, T, hidden] after these states, which it changes.  # [B, T, hidden]"""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a mixer's state."""

    name: StateName
    shape: tuple[int, ...]
    """Without the batch dimension."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Mixer:
    """A recurrent mixer of a model, by its name."""

    layer: int
    name: str
    cache_argument: str
    states: tuple[StateShape, ...]
    takes_chunks: bool
    """Whether one call over several tokens continues a state as calls for each token do. Mamba-1's does not."""
    inputs: tuple[str, ...]
    """Linear layers that are applied to the mixer's input. All rows of a pass go through them in one product."""
    output: str | None
    """Linear layer whose output is the mixer's output."""

    def module(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.name)


def keeps_states(module: ModuleType) -> bool:
    """Whether modelling code has a class of recurrent mixers."""
    return any(_calls_cache(each) for each in vars(module).values() if inspect.isclass(each))


def find_mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The mixers of a model and their names."""
    return [(name, module) for name, module in model.named_modules() if _calls_cache(type(module))]


def _calls_cache(kind: type) -> bool:
    own = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    functions = (inspect.unwrap(each) for base in own for each in vars(base).values() if inspect.isfunction(each))
    return issubclass(kind, nn.Module) and any(STATE_CALLS & {*each.__code__.co_names} for each in functions)


@torch.inference_mode()
def describe(model: Any) -> tuple[Mixer, ...]:
    """All recurrent mixers of a loaded model. Raises: UnsupportedModel for one that cannot be run row by row."""
    return tuple(_Trial(name, module, model).mixer() for name, module in find_mixers(model))


@torch.inference_mode()
def state_bytes(model: Any) -> int:
    """Bytes of one state of all recurrent mixers of a model, which may lack weights."""
    return sum(_Trial(name, module, model).num_bytes() for name, module in find_mixers(model))


def call_of(module: nn.Module, cache_argument: str) -> Call:
    """The mixer's own forward."""
    forward = module.forward
    return lambda rows, states: forward(rows, **{cache_argument: states})


@dataclass(slots=True)
class _Trial:
    """A run of one mixer over a few random rows: as a whole, row by row, and in two chunks."""

    name: str
    module: nn.Module
    model: Any
    call: Call = field(init=False)
    cache_argument: str = field(init=False)

    def __post_init__(self) -> None:
        names = inspect.signature(self.module.forward).parameters
        self.cache_argument = next((name for name in CACHE_ARGUMENTS if name in names), "")
        self.call = call_of(self.module, self.cache_argument)

    def mixer(self) -> Mixer:
        layer: Any = self.module.layer_idx
        try:
            return self._described(layer)
        except UnsupportedModel:
            raise
        except Exception as error:  # a module's own code may raise anything
            raise UnsupportedModel(
                f"layer {layer} of {self.model.config.model_type} keeps a state, but its {type(self.module).__name__} "
                f"cannot be run by itself: {cause(error)}"
            ) from error

    def num_bytes(self) -> int:
        """Bytes of one state, found without comparing values."""
        states = CallStates({})
        self.call(self._rows(), states)
        return sum(each.num_bytes for each in _shapes(states))

    def _described(self, layer: int) -> Mixer:
        rows = self._rows()
        _limit_time_steps(self.module)
        states = CallStates({})
        with _watched(self.module, rows) as (inputs, outputs):
            whole = self.call(rows, states)
        if not isinstance(whole, Tensor) or whole.shape != rows.shape:
            raise TypeError("its output is not one row for each row of its input")
        self._check_steps(layer, rows, whole, states)
        takes_chunks = self._agree(self._in_parts(rows, states, [TRIAL_CUT, TRIAL_TOKENS - TRIAL_CUT]), whole)
        output = next((name for name, each in outputs if each is whole), None)
        return Mixer(layer, self.name, self.cache_argument, _shapes(states), takes_chunks, tuple(inputs), output)

    def _check_steps(self, layer: int, rows: Tensor, whole: Tensor, states: CallStates) -> None:
        """Decoding computes single rows, and a prompt may be computed as a whole: both must give the same."""
        if not self._agree(self._in_parts(rows, states, [1] * TRIAL_TOKENS), whole):
            raise UnsupportedModel(
                f"layer {layer} of {self.model.config.model_type} computes the tokens of a prompt differently from "
                "the same tokens one by one, so its outputs would depend on how a text is cut into passes"
            )

    def _rows(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, TRIAL_TOKENS, self.model.config.hidden_size, generator=generator)
        return rows.to(self.model.device, self.model.dtype)

    def _in_parts(self, rows: Tensor, like: CallStates, sizes: Sequence[int]) -> Tensor:
        states = CallStates({name: torch.zeros_like(each) for name, each in like.values.items()})
        firsts = accumulate(sizes, initial=0)
        return torch.cat([self.call(rows.narrow(1, *part), states) for part in zip(firsts, sizes, strict=False)], dim=1)

    def _agree(self, got: Tensor, want: Tensor) -> bool:
        error = (got.float() - want.float()).abs().max()
        return bool(error <= ALLOWED_ERROR[self.model.dtype] * want.float().abs().max())


def _shapes(states: CallStates) -> tuple[StateShape, ...]:
    return tuple(StateShape(name, tuple(each.shape[1:]), each.dtype) for name, each in states.values.items())


def _limit_time_steps(module: Any) -> None:
    """Apply a Mamba-2 mixer's limits of time steps to its projection: its code applies them to chunks only."""
    low, high = getattr(module, "time_step_limit", None) or (0.0, inf)
    if (low, high) == (0.0, inf):
        return
    bias = module.dt_bias.float()
    limits = [_inverse_softplus(limit) - bias for limit in (low, high)]

    def limit(_: Any, __: Any, projected: Tensor) -> None:
        steps = projected[..., -len(bias) :]
        steps.copy_(steps.clamp(*(each.to(steps) for each in limits)))

    module.in_proj.register_forward_hook(limit)


def _inverse_softplus(value: float) -> float:
    return log(expm1(value)) if 0.0 < value < EXP_LIMIT else (-inf if value <= 0.0 else value)


@contextmanager
def _watched(module: nn.Module, rows: Tensor) -> Iterator[tuple[list[str], list[tuple[str, Tensor]]]]:
    """Names of the linear layers called with `rows` itself, and the output of each linear layer.

    Marks those that are not called: their weights are used without them.
    """
    inputs: list[str] = []
    outputs: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Callable[[Any, Any, Tensor], None]:
        def see(_: Any, given: Any, output: Tensor) -> None:
            inputs.extend([name] if given and given[0] is rows else [])
            outputs.append((name, output))

        return see

    with ExitStack() as stack:
        for name, each in module.named_modules():
            if isinstance(each, nn.Linear):
                stack.callback(each.register_forward_hook(watch(name)).remove)
        yield inputs, outputs
    called = {name for name, _ in outputs}
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear) and name not in called:
            setattr(each, WEIGHT_IS_READ, True)
