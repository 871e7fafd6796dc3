"""Checks a checkpoint's tensors by the headers of its files: names, shapes and types. Reads no weights.

A header has about 100 bytes for each tensor, so checking a model of any size needs little memory. Knows files,
and models built without weights. Must not know how tensors are used.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from core.errors import CheckpointError, UnsupportedModel, first_line
from workers.attention import ATTENTION
from workers.model.contained import Rename
from workers.model.scaled import ScaledWeights, StoredTensor, as_read, views, zero_biases

INDEX = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types, as safetensors names them, that are converted to `dtype` of the settings; all others count as quantized."""


LoadTarget: TypeAlias = tuple[tuple[str, ...], bool]
"""The names of the model's tensors that one or more stored tensors are loaded into, and whether loading converts them.
Several names if they are made from the same stored tensors."""


def meta_model(model_config: Any, dtype: str) -> Any:
    """Build the model on the meta device: without weights."""
    with torch.device("meta"):
        kind = AutoModelForSeq2SeqLM if model_config.is_encoder_decoder else AutoModelForCausalLM
        return kind.from_config(model_config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION)


def renamed(names: Iterable[str], model: Any) -> Iterator[tuple[str, Any | None, int]]:
    """The model's names of a checkpoint's tensors, which may have older names.

    Each comes with the WeightConverter that makes the model's tensor from it and other stored tensors, or None, and
    with its place among the converter's sources.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    for name in names:
        new_name, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        converter = by_pattern[pattern] if pattern is not None else None
        yield new_name, converter, converter.source_patterns.index(pattern) if converter is not None else 0


def check_stored(
    path: Path, files: Sequence[Path], model: Any, rename: Rename = str, scaled: ScaledWeights | None = None
) -> None:
    """Check that `files` hold all tensors of a meta model and no others, by type and shape.

    Called before any way of loading, because a tensor that is cast or left out, such as the scales of quantized
    weights, would change the outputs without an error. Tensors that transformers ignores are ignored here, too.
    Raises: CheckpointError, UnsupportedModel.
    """
    stored = _headers(files)
    _check_index(path, stored)
    if scaled is not None:
        stored = as_read(path, stored, scaled)
    wanted: Mapping[str, Tensor] = model.state_dict()
    sources = _sources(stored, model, rename)
    for (names, _), old_names in sources.items():
        tensors = [wanted[name] for name in names if name in wanted]
        _check_types(path, tensors, {name: stored[name] for name in old_names})
    _check_names(files, model, sources, scaled)
    for (names, is_made), old_names in sources.items():
        if tensors := [wanted[name] for name in names if name in wanted]:
            _check_sizes(path, tensors, {name: stored[name] for name in old_names}, is_made=is_made)


@contextmanager
def open_tensors(
    files: Sequence[Path], rename: Rename = str, scaled: ScaledWeights | None = None
) -> Iterator[dict[str, Any]]:
    """All tensors of `files` by their new names. Each is read when it is used."""
    with ExitStack() as stack:
        stored = views(files, stack, scaled)
        yield {name: view for old_name, view in stored.items() if (name := rename(old_name)) is not None}


def _check_names(
    files: Sequence[Path], model: Any, sources: Mapping[LoadTarget, Sequence[str]], scaled: ScaledWeights | None
) -> None:
    """Raises: CheckpointError for missing tensors, and for tensors that the model does not have."""
    wanted = model.state_dict().keys()
    stored = {name: old_names[0] for (names, _), old_names in sources.items() for name in names}
    found = SimpleNamespace(
        missing_keys=set(wanted - stored.keys() - model.all_tied_weights_keys.keys()),
        unexpected_keys=set(stored.keys() - wanted),
    )
    model._adjust_missing_and_unexpected_keys(found)  # removes those that transformers ignores in this architecture
    missing, left = sorted(found.missing_keys), sorted(stored[name] for name in found.unexpected_keys)
    if left and scaled is not None:
        left = sorted(set(left) - zero_biases(files, left, scaled))
    problems = [f"lack {_counted(missing)}"] if missing else []
    if left:
        problems.append(
            f"have {_counted(left)}, which {type(model).__name__} has no place for: "
            "they are of another model, of an adapter, or quantized"
        )
    if problems:
        raise CheckpointError(f"the weights in {files[0].parent} {', and '.join(problems)}")


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} tensors, the first is {names[0]}" if len(names) > 1 else f"1 tensor, {names[0]}"


def _headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Tensors of all files. Raises: CheckpointError for a file that is shorter or longer than its header says."""
    found = {}
    for file in files:
        try:
            # framework="pt" would map the file writable, which fails on a machine with less memory than weights.
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    view = opened.get_slice(name)
                    found[name] = StoredTensor(file.name, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or incomplete: {first_line(error)}") from error
    return found


def _check_index(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """If there is an index, check that each file holds the tensors that the index lists for it."""
    if not (path / INDEX).is_file() or (path / "model.safetensors").is_file():
        return
    for name, file in json.loads((path / INDEX).read_text())["weight_map"].items():
        if name not in stored or stored[name].file != file:
            raise CheckpointError(f"{path / INDEX} says that {file} has {name}, but the file lacks it")


def _sources(stored: Iterable[str], model: Any, rename: Rename) -> dict[LoadTarget, list[str]]:
    """Names of stored tensors by the target that they are loaded into."""
    sources = defaultdict(list)
    used = {old_name: name for old_name in stored if (name := rename(old_name)) is not None}
    for old_name, (name, converter, _) in zip(used, renamed(used.values(), model), strict=True):
        patterns = converter.target_patterns if converter is not None else [name]
        names = tuple(name.replace(patterns[0], pattern) for pattern in patterns)
        sources[names, converter is not None].append(old_name)
    return sources


def _check_types(path: Path, wanted: Sequence[Tensor], parts: Mapping[str, StoredTensor]) -> None:
    """Check that the model's floats are stored as floats, and its integers as integers.

    Stored tensors that the model does not have are left to `_check_names`.
    """
    for name, part in parts.items():
        if part.dtype not in FLOATS and any(map(torch.is_floating_point, wanted)):
            raise UnsupportedModel(
                f"{name} in {path} is stored as {part.dtype}, and config.json does not say how that is a float"
            )
        if part.dtype in FLOATS and wanted and not any(map(torch.is_floating_point, wanted)):
            raise CheckpointError(f"{name} in {path} is stored as {part.dtype}, but the model has integers there")


def _check_sizes(path: Path, wanted: Sequence[Tensor], parts: Mapping[str, StoredTensor], *, is_made: bool) -> None:
    """Check shapes of tensors stored as the model has them, and numbers of elements of converted ones."""
    name, first = next(iter(parts.items()))
    shape = tuple(wanted[0].shape)
    if not is_made and first.shape != shape:
        raise CheckpointError(f"{name} in {path} is {first.shape}, but config.json says {shape}")
    num_stored, num_wanted = sum(prod(part.shape) for part in parts.values()), sum(map(Tensor.numel, wanted))
    if num_stored != num_wanted:
        also = f" and {len(parts) - 1} like it" if len(parts) > 1 else ""
        raise CheckpointError(f"{name}{also} in {path} have {num_stored} elements, but config.json says {num_wanted}")
