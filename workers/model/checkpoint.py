"""What the files of a checkpoint hold, by their headers: names, shapes and types of tensors, and no weight is read.

A header has a hundred bytes for each tensor, so a model of any size is looked at in the memory of its code. Knows files
and models without weights. Must not know what is done with the tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from core.errors import CheckpointError, UnsupportedModel, first_line
from workers.attention import ATTENTION

INDEX = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""What is loaded in the type that the settings ask for, as safetensors names it; others are quantized."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Place:
    """What stored tensors become in the model."""

    names: tuple[str, ...]
    """Of one tensor, or of several that are made of the same."""
    is_made: bool
    """They are converted; otherwise one tensor is stored as the model has it."""


def skeleton(model_config: Any, dtype: str) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )


def renamed(names: Iterable[str], model: Any) -> Iterator[tuple[str, Any | None]]:
    """What transformers calls the tensors today that an older checkpoint has under `names`.

    With each the WeightConverter that makes the model's tensor of it and others, if it is not one by itself.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    for name in names:
        new_name, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        yield new_name, by_pattern[pattern] if pattern is not None else None


def check_stored(path: Path, files: Sequence[Path], model: Any) -> None:
    """That `files` hold each tensor of `model`, a skeleton, in its shape. Raises: CheckpointError, UnsupportedModel."""
    stored = _headers(files)
    _check_index(path, stored)
    wanted: Mapping[str, Tensor] = model.state_dict()
    sources = _sources(stored, model)
    held = {name for place in sources for name in place.names}
    missing = sorted(wanted.keys() - held - model.all_tied_weights_keys.keys())
    if missing:
        raise CheckpointError(f"the weights in {path} lack {len(missing)} tensors, the first is {missing[0]}")
    for place, old_names in sources.items():
        tensors = [wanted[name] for name in place.names if name in wanted]  # none of what is stored in vain
        parts = {name: stored[name] for name in old_names}
        _check_types(path, tensors, parts)
        if tensors:
            _check_sizes(path, tensors, parts, is_made=place.is_made)


def _headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Of all files. A file that is shorter or longer than its header says is refused. Raises: CheckpointError."""
    found = {}
    for file in files:
        try:
            # For torch it would be mapped to be written to, which a machine with less memory than weights refuses.
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    view = opened.get_slice(name)
                    found[name] = StoredTensor(file.name, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or incomplete: {first_line(error)}") from error
    return found


def _check_index(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Each shard holds what the index says, where there is one; that its shards are there has been looked at."""
    if not (path / INDEX).is_file() or (path / "model.safetensors").is_file():
        return
    for name, file in json.loads((path / INDEX).read_text())["weight_map"].items():
        if name not in stored or stored[name].file != file:
            raise CheckpointError(f"{path / INDEX} says that {file} has {name}, which it has not")


def _sources(stored: Iterable[str], model: Any) -> dict[Place, list[str]]:
    """By their place in the model: the names of the tensors that are stored for it."""
    sources = defaultdict(list)
    for old_name, (name, converter) in zip(stored, renamed(stored, model), strict=True):
        patterns = converter.target_patterns if converter is not None else [name]
        names = tuple(name.replace(patterns[0], pattern) for pattern in patterns)
        sources[Place(names, converter is not None)].append(old_name)
    return sources


def _check_types(path: Path, wanted: Sequence[Tensor], parts: Mapping[str, StoredTensor]) -> None:
    for name, part in parts.items():
        if part.dtype not in FLOATS and any(map(torch.is_floating_point, wanted)):
            raise UnsupportedModel(f"{name} in {path} is stored as {part.dtype}; quantized weights are not served")


def _check_sizes(path: Path, wanted: Sequence[Tensor], parts: Mapping[str, StoredTensor], *, is_made: bool) -> None:
    """A tensor that is stored as it is has its shape; what is made of others has as many elements."""
    name, first = next(iter(parts.items()))
    shape = tuple(wanted[0].shape)
    if not is_made and first.shape != shape:
        raise CheckpointError(f"{name} in {path} is {first.shape}, and by config.json {shape}")
    num_stored, num_wanted = sum(prod(part.shape) for part in parts.values()), sum(map(Tensor.numel, wanted))
    if num_stored != num_wanted:
        also = f" and {len(parts) - 1} like it" if len(parts) > 1 else ""
        raise CheckpointError(f"{name}{also} in {path} have {num_stored} elements, and by config.json {num_wanted}")
