"""Features: hidden states of a model's layers, which a pass returns beside its logits for heads that read them.

A head (EAGLE, Medusa, Blockwise) predicts tokens from the target's hidden states. A tap is attached to a model for the
layers that heads read; from then on `model_logits` appends their hidden states to each row of logits, so that
backends that record or compile it return them without knowing of it. A model without a tap pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from core.errors import ConfigError
from workers.model import layer_list

LAST = -1
"""Index of the last hidden state: the input of the output layer, after the final norm. 0 and above: the input of that
layer; the number of layers stands for the output of the last one, before the final norm."""
_ATTRIBUTE = "feature_tap"


class FeatureTap:
    """Keeps the hidden states that some layers of a model got in the current pass."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """Attach to `model`. Raises: ConfigError for a layer that it does not have."""
        self.layers = tuple(layers)
        self._states: dict[int, Tensor] = {}
        name, modules = layer_list(model)
        for layer in self.layers:
            if not LAST <= layer <= len(modules):
                raise ConfigError(f"feature_layers: {layer} is not in [-1, {len(modules)}]")
            if layer == LAST:
                model.get_submodule(name.rpartition(".")[0]).register_forward_hook(partial(self._keep_output, layer))
            elif layer == len(modules):
                modules[-1].register_forward_hook(partial(self._keep_output, layer))
            else:
                modules[layer].register_forward_pre_hook(partial(self._keep, layer), with_kwargs=True)
        setattr(model, _ATTRIBUTE, self)

    def _keep(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self._states[layer] = args[0] if args else kwargs["hidden_states"]

    def _keep_output(self, layer: int, module: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        self._states[layer] = output if isinstance(output, Tensor) else output[0]

    def take(self) -> list[Tensor]:
        """Hidden states of all rows, by layer.  # [T, hidden] each"""
        return [self._states.pop(layer)[0] for layer in self.layers]


def tap_of(model: Any) -> FeatureTap | None:
    return getattr(model, _ATTRIBUTE, None)
