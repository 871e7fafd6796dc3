"""A model of some of a checkpoint's layers: a draft made from the target itself, without training.

Knows configurations, modules and tensor names; must not know how the model is used. The layers keep their order and are
renumbered, so all other code sees an ordinary model with fewer layers. Sources: Draft & Verify (Zhang et al. 2023,
arXiv 2309.08168), LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), SWIFT (Xia et al. 2024, arXiv 2410.06916).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from core.errors import ConfigError, UnsupportedModel

FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers")
"""Settings that are the number of first layers without experts."""


@dataclass(frozen=True, slots=True)
class LayerSubset:
    """Layers of a model, by their numbers in the checkpoint."""

    indices: tuple[int, ...]

    def check(self, model_config: Any, path: str) -> None:
        """Raises: ConfigError for a layer number that the model does not have."""
        num_layers = model_config.num_hidden_layers
        for place, index in enumerate(self.indices):
            if not 0 <= index < num_layers:
                raise ConfigError(f"layers[{place}] is {index}, but {path} has layers 0 to {num_layers - 1}")

    def config_of(self, model_config: Any) -> Any:
        """Configuration of the model with only these layers."""
        found = deepcopy(model_config)
        for name, value in self._settings(model_config).items():
            setattr(found, name, value)
        return found

    def _settings(self, model_config: Any) -> Mapping[str, Any]:
        """Settings that differ: numbers of layers, and each list with one entry for each layer."""
        num_layers, usual = model_config.num_hidden_layers, type(model_config)()
        changed: dict[str, Any] = {"num_hidden_layers": len(self.indices)}
        for name, value in vars(model_config).items():
            if name in FIRST_LAYERS and isinstance(value, int):
                changed[name] = sum(index < value for index in self.indices)
            if isinstance(value, list) and len(value) == num_layers and not _has_own_length(name, value, usual):
                changed[name] = [value[index] for index in self.indices]
        return changed

    def check_kept(self, whole: nn.ModuleList, model: Any) -> None:
        """Check that each layer of `model`, which has only these, is built as in the `whole` list of layers.

        Raises: UnsupportedModel for a family that decides by a layer's number, in a way that `config_of` does not know.
        """
        _, kept = layer_list(model)
        for number, index in enumerate(self.indices):
            if not _are_alike(whole[index], kept[number], index, number):
                raise UnsupportedModel(
                    f"layers: {model.config.model_type} decides by a layer's number what it is, and layer {index} "
                    f"would be another as the draft's layer {number}; choose others, or a draft of its own"
                )

    def renamed(self, name: str, layers: str) -> str | None:
        """The subset model's name for a stored tensor; None if the tensor belongs to another layer.

        `layers` is the model's name for its list of layers.
        """
        found = re.search(rf"(?:^|\.){re.escape(layers)}\.(\d+)\.", name)
        if found is None:
            return name
        index = int(found[1])
        if index not in self.indices:
            return None
        return f"{name[: found.start(1)]}{self.indices.index(index)}{name[found.end(1) :]}"

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Run a whole model with only these layers, without KV. For trying subsets: loads nothing."""
        name, whole = layer_list(model)
        parent = model.get_submodule(name.rpartition(".")[0])
        settings = self._settings(model.config)
        before = {key: getattr(model.config, key) for key in settings}
        try:
            setattr(parent, name.rpartition(".")[2], nn.ModuleList([whole[index] for index in self.indices]))
            for key, value in settings.items():
                setattr(model.config, key, value)
            yield
        finally:
            setattr(parent, name.rpartition(".")[2], whole)
            for key, value in before.items():
                setattr(model.config, key, value)


def _are_alike(one: nn.Module, other: nn.Module, number: int, other_number: int) -> bool:
    """Whether two layers have the same modules, shapes and settings, but for their numbers."""
    modules, others = dict(one.named_modules()), dict(other.named_modules())
    return modules.keys() == others.keys() and all(
        type(module) is type(others[name])
        and _shapes(module) == _shapes(others[name])
        and _have_same_settings(module, others[name], number, other_number)
        for name, module in modules.items()
    )


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: value.shape for name, value in module.named_parameters(recurse=False)}


def _have_same_settings(one: nn.Module, other: nn.Module, number: int, other_number: int) -> bool:
    settings, others = vars(one), vars(other)
    return settings.keys() == others.keys() and all(
        value == others[name] or (type(value) is int and (value, others[name]) == (number, other_number))
        for name, value in settings.items()
        if isinstance(value, int | float | str | None)
    )


def _has_own_length(name: str, value: list[Any], usual: Any) -> bool:
    """Whether a list has as many entries as there are layers by coincidence, such as two limits, or several tokens.

    `usual` is a configuration of the same class, whose number of layers is another one.
    """
    default = getattr(usual, name, None)
    is_coincidence = isinstance(default, Sequence) and len(default) == len(value) != usual.num_hidden_layers
    return name.endswith("_token_id") or is_coincidence


def layer_list(model: Any) -> tuple[str, nn.ModuleList]:
    """A model's list of layers and its name. Raises: UnsupportedModel unless exactly one list fits.

    It has an entry for each layer and is not in another list, as that of a layer's experts is.
    """
    num_layers = model.config.num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not _is_in_list(name)
    ]
    if len(found) != 1:
        raise UnsupportedModel(f"{model.config.model_type} has {len(found)} lists of layers, so none can be chosen")
    return found[0]


def _is_in_list(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))
