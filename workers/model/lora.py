"""Reads LoRA adapters in PEFT's format: one rank's part of the two matrices of each module.

An adapter adds `scale * B @ A` to the weights of some linear layers (Hu et al. 2021, arXiv 2106.09685, section 4.1).
Anything more is refused, and the refusal names the setting or the tensor. Knows files, modules and slices. Must not
know steps, nor which rows use an adapter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel, first_line
from core.records import Adapter
from workers.model.checkpoint import renamed
from workers.model.contained import Rename
from workers.model.digest import digest
from workers.model.experts import ParameterShards
from workers.model.shards import ROWS, VOCABULARY, ModelShard, ModuleShard, is_elsewhere
from workers.recurrent import find_mixers

LATENT = ".kv_b_proj"
"""Layers that latent attention absorbs (`workers.attention.latent`)."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK: Final = 512
PREFIX = "base_model.model."
"""PEFT's prefix of the model's own names."""
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the model's weights, too
}
"""Values of settings besides "absent" with which an adapter is plain LoRA."""
FOREIGN = (
    "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Settings that make an adapter more than plain LoRA, unless they are empty. So does each `use_...` but one."""
RANK_STABILIZED = "use_rslora"
"""Scale by alpha / sqrt(r) (Kalajdzievski 2023, arXiv 2312.03732)."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The matrices of one module: its output gets `rows @ down.T @ up.T` in addition."""

    down: Tensor  # [r, in], A
    up: Tensor  # [out, r], B times the scale


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One rank's part of an adapter."""

    adapter: Adapter
    """Includes the digest of its files."""
    pairs: Mapping[str, LoraPair]
    """Its matrices, by the names of the model's modules."""


def starting_adapters(config: EngineConfig) -> list[Adapter]:
    """The adapters that the settings name."""
    return [Adapter(name, path) for name, path in config.adapters.items()]


def read_adapter(
    adapter: Adapter, model: Any, shard: ModelShard | None = None, rename: Rename | None = None
) -> LoraWeights:
    """Read an adapter for a model, or for one rank's shard of it, with the model's dtype and device.

    Raises: CheckpointError for files that are damaged or of another model; UnsupportedModel for more than plain LoRA.
    """
    try:
        return _read(adapter, model, shard, rename or str)
    except (CheckpointError, UnsupportedModel) as error:
        raise type(error)(f"adapter {adapter.name!r} in {adapter.path}: {error}") from error
    except torch.OutOfMemoryError as error:
        problem = "the device has no memory left for it"
        raise StartupError(f"adapter {adapter.name!r} in {adapter.path}: {problem}: {first_line(error)}") from error


def _read(adapter: Adapter, model: Any, shard: ModelShard | None, rename: Rename) -> LoraWeights:
    path = Path(adapter.path)
    config = _config(path)
    tensors, found_digest = _tensors(path)
    if adapter.digest not in ("", found_digest):
        raise CheckpointError("its files are not those that it was loaded from at first")
    matrices = _by_module(tensors, model, rename)
    _check_targets(config, matrices)
    matrices = {name: parts for name, parts in matrices.items() if not is_elsewhere(model, name)}
    mixers = tuple(f"{mixer}." for mixer, _ in find_mixers(model))
    for name, parts in matrices.items():
        if name.startswith(mixers):
            raise UnsupportedModel(f"{name} is in a recurrent mixer, which runs apart from the rows of a step")
        _check_module(name, parts, model, config)
    shards = shard.shards if shard is not None else {}
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get(RANK_STABILIZED) else config["r"])
    pairs = {}
    for name, parts in matrices.items():
        of_module = shards.get(name)
        assert not isinstance(of_module, ParameterShards), "experts are no linear layers, which `_check_module` wants"
        pairs[name] = _pair(parts, of_module, scale, model)
    return LoraWeights(replace(adapter, digest=found_digest), pairs)


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG} cannot be read: {first_line(error)}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UnsupportedModel(f"peft_type must be LORA, got {kind!r}")
    for name, value in config.items():
        is_foreign = bool(value) and (name in FOREIGN or (name.startswith("use_") and name != RANK_STABILIZED))
        if is_foreign or (value is not None and value not in PLAIN.get(name, (value,))):
            raise UnsupportedModel(f"{name} is {value!r}; only plain LoRA is served")
    _check_scale(config.get("r"), config.get("lora_alpha"))
    return config


def _check_scale(rank: object, alpha: object) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise UnsupportedModel(f"r must be in [1, {MAX_RANK}], got {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"lora_alpha must be a number, got {alpha!r}")


def _tensors(path: Path) -> tuple[Mapping[str, Tensor], str]:
    """All tensors, and the digest of each byte of them."""
    file = path / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"there is no {WEIGHTS}; only safetensors weights are served")
    try:
        tensors = load_file(file)
        found = digest(path / CONFIG, [file], file.stat().st_size)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{WEIGHTS} is damaged or incomplete: {first_line(error)}") from error
    for name, tensor in tensors.items():
        if not torch.is_floating_point(tensor) or not bool(tensor.float().isfinite().all()):
            raise CheckpointError(f"{name} is not made of finite numbers")
    return tensors, found


def _by_module(tensors: Mapping[str, Tensor], model: Any, rename: Rename) -> dict[str, dict[str, Tensor]]:
    """The parts A and B of each module, by the model's name for it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(f"tensor {name} is no matrix of plain LoRA on a linear layer")
        found.setdefault(match["module"].removeprefix(PREFIX), {})[match["part"]] = tensor
    if not found:
        raise CheckpointError("it has no tensors")
    return dict(zip(_renamed(found, model, rename), found.values(), strict=True))


def _renamed(names: Mapping[str, object], model: Any, rename: Rename) -> Iterator[str]:
    """The model's names of modules, which may have older names in the adapter, or those of a multimodal model."""
    weights = []
    for name in names:
        weight = rename(f"{name}.weight")
        if weight is None:
            raise UnsupportedModel(f"{name} is not in the text model, which alone is served")
        weights.append(weight)
    for name, (new_name, converter, _) in zip(names, renamed(weights, model), strict=True):
        if converter is not None:
            raise UnsupportedModel(f"{name} is not a module as the model has it, so an adapter cannot be added to it")
        yield new_name.removesuffix(".weight")


def _check_targets(config: Mapping[str, Any], matrices: Mapping[str, object]) -> None:
    """Check that the file has something for each listed module; a pattern stands for any."""
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not any(name == target or name.endswith(f".{target}") for name in matrices):
            raise CheckpointError(f"target_modules has {target!r}, for which {WEIGHTS} has no tensors")


def _check_module(name: str, parts: Mapping[str, Tensor], model: Any, config: Mapping[str, Any]) -> None:
    """Raises: CheckpointError unless the module exists and the matrices fit it; UnsupportedModel for other kinds."""
    base = config.get("base_model_name_or_path")
    try:
        module = model.get_submodule(name)
    except AttributeError:
        if name.endswith(LATENT):
            raise UnsupportedModel(f"{name} is kept as latents, to which no adapter can be added") from None
        raise CheckpointError(
            f"the model has no module {name}; the adapter was made for {base!r}, and this is a {type(model).__name__}"
        ) from None
    if name.endswith(LATENT) and hasattr(model.get_submodule(name.rpartition(".")[0]), "expand_kv"):
        raise UnsupportedModel(f"{name} is kept as latents, to which no adapter can be added")
    if ".experts." in f"{name}." or not _is_linear(module):
        raise UnsupportedModel(
            f"{name} is a {type(module).__name__}; adapters are served on linear layers outside experts"
        )
    num_in, num_out = _features(module)
    wanted = {"A": (config["r"], num_in), "B": (num_out, config["r"])}
    for part, shape in wanted.items():
        if part not in parts:
            raise CheckpointError(f"{name} lacks its matrix lora_{part}")
        if tuple(parts[part].shape) != shape:
            raise CheckpointError(
                f"lora_{part} of {name} is {list(parts[part].shape)}, where the model and r need {list(shape)}; "
                f"the adapter was made for {base!r}"
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, Conv1D) or isinstance(getattr(module, "in_features", None), int)


def _features(module: Any) -> tuple[int, int]:
    """Numbers of input and output features, over all ranks."""
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def _pair(parts: Mapping[str, Tensor], shard: ModuleShard | None, scale: float, model: Any) -> LoraPair:
    """This rank's part, where the model is. A model without weights is only checked for."""
    down, up = _slices(parts, shard)
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    return LoraPair(*(each.to(device, model.dtype).contiguous() for each in (down, up.float() * scale)))


def _slices(parts: Mapping[str, Tensor], shard: ModuleShard | None) -> tuple[Tensor, Tensor]:
    """This rank's parts of A and B: of A where the module's input is split, of B where its output is.

    Where the input is split, a rank's product is a summand, as the module's own is, and the same all-reduce adds it up.
    """
    down, up = parts["A"], parts["B"]
    if shard is None or shard.style in VOCABULARY:
        return down, up
    return (down[:, shard.span], up) if shard.style in ROWS else (down, up[shard.span])
