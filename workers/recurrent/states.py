"""States of a model's recurrent layers in slots, and how a pass runs the layers over them.

Replaces each mixer's forward by one that runs the mixer's own code call by call, each over rows whose states are known
(`workers.step.states` orders them). Linear layers at both ends of a mixer run once over all rows of the pass: otherwise
each call would read their weights. Must not know what a mixer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from workers.recurrent.call_states import CallStates, StateName
from workers.recurrent.mixers import Call, Mixer, call_of
from workers.step import INITIAL, StateRows, upload

Linear = Callable[[Tensor], Tensor]
MAX_STEPPED_ROWS: Final = 32
"""More tokens of a sequence than this are a prefill chunk, which a mixer computes in one call."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of every mixer, on the device: B sequences of T rows."""

    rows: Tensor  # [B*T]
    shape: tuple[int, int]
    sources: Tensor  # [B]
    targets: Tensor  # [B]


class States:
    """States of all recurrent layers, and the calls of the current pass."""

    def __init__(self, model: Any, mixers: Sequence[Mixer], num_states: int, *, is_deterministic: bool) -> None:
        """Makes the model's mixers read and write these states.

        In deterministic passes each row is a call, because rows of a chunk have other bits than rows one by one.
        """
        self.calls: list[_Call] = []
        has_chunks = not is_deterministic and all(mixer.takes_chunks for mixer in mixers)
        self.max_stepped = MAX_STEPPED_ROWS if has_chunks else None
        self._device = model.device
        self.mixers = [_RunMixer(self, mixer, mixer.module(model), num_states, model.device) for mixer in mixers]

    def begin_step(self, calls: Sequence[StateRows]) -> None:
        """Set the calls of the next pass."""
        self.calls = [self._upload(call) for call in calls]

    def _upload(self, call: StateRows) -> _Call:
        shape = (1, len(call.rows)) if call.is_chunk else (len(call.rows), 1)
        end = len(call.rows) + len(call.sources)
        parts = upload([*call.rows, *call.sources, *call.targets], self._device, torch.int64)
        return _Call(parts[: len(call.rows)], shape, parts[len(call.rows) : end], parts[end:])


class _RunMixer:
    """A mixer's forward over the rows of a pass."""

    def __init__(self, states: States, mixer: Mixer, module: Any, num_states: int, device: torch.device) -> None:
        self._states = states
        self._call: Call = call_of(module, mixer.cache_argument)
        self.pools: dict[StateName, Tensor] = {
            each.name: torch.zeros((INITIAL + 1 + num_states, *each.shape), dtype=each.dtype, device=device)
            for each in mixer.states
        }
        self._inputs = [_Input(module.get_submodule(name)) for name in mixer.inputs]
        self._output = _Output(module.get_submodule(mixer.output)) if mixer.output is not None else None
        module.forward = self

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """# [1, T, hidden] -> [1, T, hidden]; zeros for rows outside of all calls"""
        for each in self._inputs:
            each.begin(hidden_states)
        outputs: Tensor | None = None
        for call in self._states.calls:
            got = self._run(call, hidden_states)
            outputs = got.new_zeros(hidden_states.shape[1], got.shape[1]) if outputs is None else outputs
            outputs.index_copy_(0, call.rows, got)
        for each in self._inputs:
            each.end()
        assert outputs is not None, "a pass without rows"
        return outputs[None] if self._output is None else self._output.linear(outputs[None])

    def _run(self, call: _Call, hidden_states: Tensor) -> Tensor:
        """Run the mixer for one call, and store the states after it.  # [B*T, hidden]"""
        for each in self._inputs:
            each.call = call
        states = CallStates({name: pool.index_select(0, call.sources) for name, pool in self.pools.items()})
        got = self._call(hidden_states[0].index_select(0, call.rows).view(*call.shape, -1), states)
        for name, pool in self.pools.items():
            pool.index_copy_(0, call.targets, states.values[name].to(pool.dtype))
        return got.reshape(len(call.rows), -1)


class _Input:
    """A linear layer of a mixer's input, computed once for all rows of a pass."""

    call: _Call

    def __init__(self, module: Any) -> None:
        self._linear: Linear = module.forward
        self._rows: Tensor | None = None
        module.forward = self._rows_of_call

    def begin(self, hidden_states: Tensor) -> None:
        self._rows = self._linear(hidden_states)[0]

    def end(self) -> None:
        self._rows = None

    def _rows_of_call(self, _: Tensor) -> Tensor:
        assert self._rows is not None, "a mixer was called outside of a pass"
        return self._rows.index_select(0, self.call.rows).view(*self.call.shape, -1)


class _Output:
    """A linear layer that ends a mixer: left out of each call, and applied to all rows together."""

    def __init__(self, module: Any) -> None:
        self.linear: Linear = module.forward
        module.forward = lambda rows: rows
