"""The tensors of a checkpoint by the headers of its files: names, shapes and types. No weight is read.

A header has about 100 bytes for each tensor, so the check of a model of any size needs little memory. Knows files and
models without weights. Must not know how tensors are used.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

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
"""Types, as safetensors names them, that are converted to `dtype` of the settings; others are quantized."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


LoadTarget: TypeAlias = tuple[tuple[str, ...], bool]
"""What one or more stored tensors are loaded into: names of the model's tensors, several where they are made from the
same stored ones; and whether they are made by conversion, or one stored tensor is the model's own."""


def meta_model(model_config: Any, dtype: str) -> Any:
    """The model on the meta device: without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )


def renamed(names: Iterable[str], model: Any) -> Iterator[tuple[str, Any | None]]:
    """Today's names of the tensors that an older checkpoint has under `names`.

    With each comes the WeightConverter that makes the model's tensor from it and others, or None.
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
    """Check that `files` hold all tensors of a meta model, by shape. Raises: CheckpointError, UnsupportedModel."""
    stored = _headers(files)
    _check_index(path, stored)
    wanted: Mapping[str, Tensor] = model.state_dict()
    sources = _sources(stored, model)
    available = {name for names, _ in sources for name in names}
    missing = sorted(wanted.keys() - available - model.all_tied_weights_keys.keys())
    if missing:
        raise CheckpointError(f"the weights in {path} lack {len(missing)} tensors, the first is {missing[0]}")
    for (names, is_made), old_names in sources.items():
        tensors = [wanted[name] for name in names if name in wanted]  # what the model lacks is ignored
        parts = {name: stored[name] for name in old_names}
        _check_types(path, tensors, parts)
        if tensors:
            _check_sizes(path, tensors, parts, is_made=is_made)


def _headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of all files. Raises: CheckpointError for a file that is shorter or longer than its header says."""
    found = {}
    for file in files:
        try:
            # With framework="pt" the file is mapped writable, which fails on a machine with less memory than weights.
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    view = opened.get_slice(name)
                    found[name] = StoredTensor(file.name, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or incomplete: {first_line(error)}") from error
    return found


def _check_index(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Check that each file holds the tensors that the index names, if there is an index."""
    if not (path / INDEX).is_file() or (path / "model.safetensors").is_file():
        return
    for name, file in json.loads((path / INDEX).read_text())["weight_map"].items():
        if name not in stored or stored[name].file != file:
            raise CheckpointError(f"{path / INDEX} says that {file} has {name}, but the file lacks it")


def _sources(stored: Iterable[str], model: Any) -> dict[LoadTarget, list[str]]:
    """The names of the stored tensors, by the target that they are loaded into."""
    sources = defaultdict(list)
    for old_name, (name, converter) in zip(stored, renamed(stored, model), strict=True):
        patterns = converter.target_patterns if converter is not None else [name]
        names = tuple(name.replace(patterns[0], pattern) for pattern in patterns)
        sources[names, converter is not None].append(old_name)
    return sources


def _check_types(path: Path, wanted: Sequence[Tensor], parts: Mapping[str, StoredTensor]) -> None:
    for name, part in parts.items():
        if part.dtype not in FLOATS and any(map(torch.is_floating_point, wanted)):
            raise UnsupportedModel(f"{name} in {path} is stored as {part.dtype}; quantized weights are not served")


def _check_sizes(path: Path, wanted: Sequence[Tensor], parts: Mapping[str, StoredTensor], *, is_made: bool) -> None:
    """A tensor that is stored as it is must have its shape; one that is converted, the number of elements."""
    name, first = next(iter(parts.items()))
    shape = tuple(wanted[0].shape)
    if not is_made and first.shape != shape:
        raise CheckpointError(f"{name} in {path} is {first.shape}, but config.json says {shape}")
    num_stored, num_wanted = sum(prod(part.shape) for part in parts.values()), sum(map(Tensor.numel, wanted))
    if num_stored != num_wanted:
        also = f" and {len(parts) - 1} like it" if len(parts) > 1 else ""
        raise CheckpointError(f"{name}{also} in {path} have {num_stored} elements, but config.json says {num_wanted}")
