"""Reads a checkpoint tensor by tensor: the whole model, or one rank's shard without reading the rest.

Knows files, and modules without weights. Must not know what is split and why (`sharding` does), nor how ranks
communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.core_model_loading import build_glob_alternation

from core.config import EngineConfig
from core.errors import CheckpointError, UnsupportedModel
from workers.model.checkpoint import meta_model, open_tensors
from workers.model.contained import Rename
from workers.model.experts import by_model_name, summed_blocks
from workers.model.scaled import ScaledWeights
from workers.model.shards.reading import TensorReader
from workers.model.shards.sharding import (
    VOCABULARY,
    Collectives,
    CompilableCollectives,
    LocalCollectives,
    Shard,
    shards_of,
)
from workers.model.shards.stages import PipelineStage, StageLinks, StageModel

MAX_COMMON_ELEMENTS = 1 << 16


@dataclass(slots=True)
class ModelShard:
    """The part of a model that rank `index` of the `size` ranks of a stage holds."""

    index: int
    size: int
    by_expert: bool = False
    """Whether a rank has whole experts, and not a part of each."""
    stage: PipelineStage = field(default_factory=PipelineStage)
    num_local: int = 1
    """Number of ranks on this rank's machine, which share its memory."""
    collectives: Collectives = field(init=False, default=LocalCollectives(1))
    _stage: StageModel | None = field(init=False, default=None)
    """None if there is one stage."""
    _shards: Mapping[str, Shard] = field(init=False, default_factory=dict)
    _blocks: Mapping[str, Any] = field(init=False, default_factory=dict)
    """Modules whose output is added up over ranks, instead of that of the modules in them."""
    _hooks: list[RemovableHandle] = field(init=False, default_factory=list)

    def check(self, model_config: Any) -> None:
        """Raises: UnsupportedModel if the model cannot be split over this number of ranks. Needs no weights."""
        self.shards_of(_shardable_meta_model(model_config, "float32"))

    def read(
        self,
        files: Sequence[Path],
        model_config: Any,
        config: EngineConfig,
        scaled: ScaledWeights | None = None,
        rename: Rename = str,
    ) -> tuple[Any, int]:
        """Load the model with this rank's weights. Returns it, and the number of parameters of all ranks together.

        Until `connect` its results have the right shapes but wrong values. Raises: CheckpointError, UnsupportedModel.
        """
        model = _shardable_meta_model(model_config, config.dtype)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._shards = self.shards_of(model)
        if self.stage.count > 1:
            self._stage = StageModel(model, self.stage)
            modules = set(model.modules())
            self._shards = {name: shard for name, shard in self._shards.items() if shard.module in modules}
        _load(model, files, self._shards, config, scaled, rename)
        self._blocks = {name: model.get_submodule(name) for name in summed_blocks(model, self._shards)}
        self.connect(LocalCollectives(self.size))
        if self._stage is not None:
            self._stage.check()
        return model, num_parameters

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's shards of the model that was read."""
        return self._shards

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.size * self.stage.count

    @property
    def layers(self) -> range | None:
        """The layers that this rank has a part of; None if there is one stage, which has all."""
        return None if self._stage is None else self._stage.layers

    def shards_of(self, model: Any) -> dict[str, Shard]:
        return {} if self.size == 1 else shards_of(model, self.index, self.size, by_expert=self.by_expert)

    def connect(self, collectives: Collectives, links: StageLinks | None = None) -> None:
        """Make the model combine its results with those of the other ranks through `collectives`, and exchange states
        with other stages through `links`."""
        self.collectives, collectives = collectives, CompilableCollectives(collectives, self.size)
        for hook in self._hooks:
            hook.remove()
        parts, local = tuple(f"{name}." for name in self._blocks), LocalCollectives(self.size)
        self._hooks = [
            hook
            for name, shard in self._shards.items()
            if self._stage is None or shard.module is not self._stage.idle
            for hook in shard.hooks(local if name.startswith(parts) else collectives)
        ]
        for block in self._blocks.values():
            self._hooks.append(block.register_forward_hook(lambda _, args, output: collectives.all_reduce(output)))  # noqa: ARG005
        if self._stage is not None and links is not None:
            self._hooks += self._stage.hooks(links)

    @property
    def num_sums(self) -> int:
        """Number of all-reduces of a pass, which must be the same on all ranks."""
        in_blocks = tuple(f"{name}." for name in self._blocks)
        alone = [name for name, shard in self._shards.items() if shard.is_summed and not name.startswith(in_blocks)]
        return len(alone) + len(self._blocks)

    def common_tensors(self, model: Any) -> Iterator[Tensor]:
        """Small parameters that every rank holds whole, mostly norms."""
        sharded_modules = {id(shard.module) for shard in self._shards.values()}
        for module in model.modules():
            if id(module) not in sharded_modules:
                small = (value for value in module.parameters(recurse=False) if value.numel() <= MAX_COMMON_ELEMENTS)
                yield from small


def read_by_tensor(
    files: Sequence[Path],
    model_config: Any,
    config: EngineConfig,
    scaled: ScaledWeights | None = None,
    rename: Rename = str,
) -> Any:
    """Load the whole model. Each tensor goes to its device at once, so the host holds few beside the files.

    Raises: CheckpointError; UnsupportedModel if tensors have to be converted.
    """
    model = _shardable_meta_model(model_config, config.dtype)
    _load(model, files, {}, config, scaled, rename)
    return model


def _load(
    model: Any,
    files: Sequence[Path],
    shards: Mapping[str, Shard],
    config: EngineConfig,
    scaled: ScaledWeights | None,
    rename: Rename,
) -> None:
    """Fill a meta model with weights and buffers; set evaluation mode. Raises: CheckpointError, UnsupportedModel."""
    path = files[0].parent
    try:
        _fill(model, files, shards, torch.device(config.device), scaled, rename)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the weights in {path} are damaged: {error}") from error
    _fill_buffers(model, torch.device(config.device))
    model.eval()


def _shardable_meta_model(model_config: Any, dtype: str) -> Any:
    """Build the model without weights, with the weights in float32 that it keeps so in any dtype."""
    model = meta_model(model_config, dtype)
    if kept := model._get_dtype_plan(getattr(torch, dtype)):
        names, _, _ = build_glob_alternation(list(kept))
        for name, tensor in model.state_dict().items():
            if names.search(name):
                _put(model, name, tensor.float())
    return model


def _fill(
    model: Any,
    files: Sequence[Path],
    shards: Mapping[str, Shard],
    device: torch.device,
    scaled: ScaledWeights | None,
    rename: Rename,
) -> None:
    """Load this rank's part of each parameter and each stored buffer."""
    with open_tensors(files, rename, scaled) as tensors:
        stored = by_model_name(tensors, model)
        expected: dict[str, Tensor] = model.state_dict()
        tied = {
            name: source
            for name, source in model.all_tied_weights_keys.items()
            if name in expected and name not in stored
        }
        own = [name for name in expected if name not in tied]
        if absent := [name for name in own if name not in stored]:  # transformers would compute them
            raise UnsupportedModel(f"{absent[0]} is not stored, and is made when the model is read as a whole")
        wanted = [(name, expected[name], shards.get(name.rpartition(".")[0])) for name in own]
        wanted = [each for each in wanted if not _has_other_rank(each[0], each[2])]
        for (name, _, _), value in zip(wanted, TensorReader(stored, device).read_all(wanted), strict=True):
            _put(model, name, value)
        for name, source in tied.items():
            _tie(model, name, source, shards)


def _has_other_rank(name: str, shard: Shard | None) -> bool:
    """Whether this is a bias that another rank adds. The module is then left without one."""
    if shard is None or shard.has_bias or not name.endswith(".bias"):
        return False
    shard.module.register_parameter("bias", None)
    return True


def _put(model: Any, name: str, value: Tensor) -> None:
    module_name, _, leaf = name.rpartition(".")
    module: nn.Module = model.get_submodule(module_name)
    if leaf in module._buffers:
        module._buffers[leaf] = value
        return
    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    module._parameters[leaf]._is_hf_initialized = True  # type: ignore[union-attr]  # transformers asks for it


def _tie(model: Any, name: str, source: str, shards: Mapping[str, Shard]) -> None:
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
