"""Reads a checkpoint tensor by tensor: the whole model, or one rank's shard without reading the rest.

Knows files, and modules without weights. Must not know what is split and why (`workers.model.sharding` does), nor how
ranks communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.config import EngineConfig
from core.errors import CheckpointError, UnsupportedModel
from workers.model.checkpoint import meta_model, renamed
from workers.model.scaled import ScaledWeights, views
from workers.model.sharding import VOCABULARY, Collectives, LocalCollectives, ModuleShard, shards_of

MAX_COMMON_ELEMENTS = 1 << 16


@dataclass(slots=True)
class ModelShard:
    """The part of a model that rank `index` of `size` holds."""

    index: int
    size: int
    _shards: Sequence[ModuleShard] = field(init=False, default=())
    _hooks: list[RemovableHandle] = field(init=False, default_factory=list)

    def check(self, model_config: Any) -> None:
        """Raises: UnsupportedModel if the model cannot be split over this number of ranks. Needs no weights."""
        shards_of(_shardable_meta_model(model_config, "float32"), self.index, self.size)

    def read(
        self, files: Sequence[Path], model_config: Any, config: EngineConfig, scaled: ScaledWeights | None = None
    ) -> tuple[Any, int]:
        """Load the model with this rank's weights. Returns it, and the number of parameters of all ranks together.

        Until `connect` its results have the right shapes but wrong values. Raises: CheckpointError, UnsupportedModel.
        """
        model = _shardable_meta_model(model_config, config.dtype)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        shards = shards_of(model, self.index, self.size)
        _load(model, files, shards, config, scaled)
        self._shards = list(shards.values())
        self.connect(LocalCollectives(self.size))
        return model, num_parameters

    def connect(self, collectives: Collectives) -> None:
        """Make the model combine its results with those of the other ranks through `collectives`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [hook for shard in self._shards for hook in shard.hooks(collectives)]

    def common_tensors(self, model: Any) -> Iterator[Tensor]:
        """Small parameters that every rank holds whole, mostly norms."""
        sharded_modules = {id(shard.module) for shard in self._shards}
        for module in model.modules():
            if id(module) not in sharded_modules:
                small = (value for value in module.parameters(recurse=False) if value.numel() <= MAX_COMMON_ELEMENTS)
                yield from small


def read_by_tensor(
    files: Sequence[Path], model_config: Any, config: EngineConfig, scaled: ScaledWeights | None = None
) -> Any:
    """Load the whole model. Each tensor goes to its device at once, so the host never holds more than one.

    Raises: CheckpointError; UnsupportedModel if tensors have to be converted.
    """
    model = _shardable_meta_model(model_config, config.dtype)
    _load(model, files, {}, config, scaled)
    return model


def _load(
    model: Any,
    files: Sequence[Path],
    shards: Mapping[str, ModuleShard],
    config: EngineConfig,
    scaled: ScaledWeights | None,
) -> None:
    """Fill a meta model with weights and buffers; set evaluation mode. Raises: CheckpointError, UnsupportedModel."""
    path = files[0].parent
    try:
        _fill(model, files, shards, torch.device(config.device), scaled)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the weights in {path} are damaged: {error}") from error
    _fill_buffers(model, torch.device(config.device))
    model.eval()


def _shardable_meta_model(model_config: Any, dtype: str) -> Any:
    """Build the model without weights. Raises: UnsupportedModel if it cannot be read tensor by tensor."""
    model = meta_model(model_config, dtype)
    if dtype != "float32" and getattr(model, "_keep_in_fp32_modules_strict", None):
        raise UnsupportedModel(f"{model_config.model_type} keeps weights in float32, which shards in {dtype} do not")
    return model


@dataclass(frozen=True, slots=True)
class _Files:
    """Tensors of a checkpoint by the model's names for them."""

    holders: Mapping[str, Any]
    """Each tensor's view in its file."""

    @classmethod
    def open(cls, files: Sequence[Path], model: Any, stack: ExitStack, scaled: ScaledWeights | None) -> _Files:
        """Raises: UnsupportedModel if stored tensors have to be converted into the model's."""
        stored = views(files, stack, scaled)
        return cls(dict(zip(_renamed(list(stored), model), stored.values(), strict=True)))

    def part(self, name: str, shard: ModuleShard | None) -> Tensor:
        """Read this rank's part of a tensor, and nothing else of it."""
        view = self.holders[name]
        part: Tensor = view[...] if shard is None else shard.of(name.rpartition(".")[2], view)
        return part.contiguous()


def _renamed(names: Sequence[str], model: Any) -> Iterator[str]:
    """The model's names for these tensors. Raises: UnsupportedModel for a tensor that has to be converted."""
    for name, (new_name, converter) in zip(names, renamed(names, model), strict=True):
        if converter is not None:
            raise UnsupportedModel(f"{name} is not a weight as the model has it, and cannot be split; use one rank")
        yield new_name


def _fill(
    model: Any,
    files: Sequence[Path],
    shards: Mapping[str, ModuleShard],
    device: torch.device,
    scaled: ScaledWeights | None,
) -> None:
    """Load this rank's part of each parameter and each stored buffer."""
    with ExitStack() as stack:
        stored = _Files.open(files, model, stack, scaled)
        expected: dict[str, Tensor] = model.state_dict()
        tied = {name: source for name, source in model.all_tied_weights_keys.items() if name not in stored.holders}
        own = [name for name in expected if name not in tied]
        if absent := [name for name in own if name not in stored.holders]:  # transformers would compute them
            raise UnsupportedModel(f"{absent[0]} is not stored, and is made when the model is read as a whole")
        for name in own:
            module_name, _, leaf = name.rpartition(".")
            shard = shards.get(module_name)
            if shard is not None and leaf == "bias" and not shard.has_bias:
                shard.module.register_parameter("bias", None)
            else:
                part = stored.part(name, shard)
                _put(model, name, part.to(device=device, dtype=expected[name].dtype))
        for name, source in tied.items():
            _tie(model, name, source, shards)


def _put(model: Any, name: str, value: Tensor) -> None:
    module_name, _, leaf = name.rpartition(".")
    module: nn.Module = model.get_submodule(module_name)
    if leaf in module._buffers:
        module._buffers[leaf] = value
        return
    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    module._parameters[leaf]._is_hf_initialized = True  # type: ignore[union-attr]  # transformers asks for it


def _tie(model: Any, name: str, source: str, shards: Mapping[str, ModuleShard]) -> None:
    """Make `name` share the memory of `source`: a tied output layer and its embedding are split alike."""
    shard, source_shard = (shards.get(key.rpartition(".")[0]) for key in (name, source))
    value: Tensor = model.get_parameter(source).data
    if source_shard is not None and source_shard.style in VOCABULARY:
        value = value[: source_shard.span.stop - source_shard.span.start]
    if source_shard is None and shard is not None:
        value = shard.of(name.rpartition(".")[2], value)
    elif (shard and shard.span) != (source_shard and source_shard.span):
        raise UnsupportedModel(f"{name} is tied to {source}, but they are not split alike")
    _put(model, name, value)


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds: rotary frequencies and scale factors.

    Always computed on the host, so that they have the same bits on every device.
    """
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if names:
            model._init_weights(module)
        for name in names:
            module._buffers[name] = module._buffers[name].to(device)
    left = [name for name, tensor in _tensors(model) if tensor.is_meta and device.type != "meta"]
    assert not left, f"without weights: {left}"


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
