"""Writes a checkpoint's quantized weights as floats: the same checkpoint, without scales. Must not know layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.errors import ConfigError
from workers.model.checkpoint import INDEX, check_stored, meta_model, renamed
from workers.model.folder import check_files, copy_settings, read_config
from workers.model.scaled import DECLARED, ScaledView, ScaledWeights, views, zero_biases
from workers.model.servable import check_architecture

MAX_FILE_BYTES = 4 << 30
"""Bytes of tensors in a file, which are in memory together."""


def write_dequantized(folder: Path, out: Path, dtype: str, progress: Callable[[str], None]) -> None:
    """Write the checkpoint in `folder` into the directory `out`, with quantized weights in `dtype`.

    Raises: ConfigError if no weights are quantized; otherwise as loading does.
    """
    files, (config, scaled) = check_files(folder), read_config(folder)
    if scaled is None:
        raise ConfigError(f"{folder / 'config.json'} declares no quantized weights; serve the directory as it is")
    check_architecture(config)
    model = meta_model(config, dtype)
    check_stored(folder, files, model, scaled=scaled)
    num_bytes = sum(value.numel() for value in model.parameters()) * getattr(torch, dtype).itemsize
    progress(f"{scaled.kinds} weights of {folder} are dequantized to {dtype}, which takes {num_bytes / 1e6:.0f} MB")
    out.mkdir()
    with ExitStack() as stack:
        stored = _without_zero_biases(views(files, stack, scaled), model, files, scaled)
        _write_files(_read(stored, dtype), out)
    _copy_others(folder, out, dtype)


def _without_zero_biases(stored: dict[str, Any], model: Any, files: Any, scaled: ScaledWeights) -> dict[str, Any]:
    """Without those that the model has no place for: nothing would say any more why they may be there."""
    known = model.state_dict()
    names = list(stored)
    foreign = [name for name, (new, *_) in zip(names, renamed(names, model), strict=True) if new not in known]
    padding = zero_biases(files, foreign, scaled) if foreign else set()
    return {name: view for name, view in stored.items() if name not in padding}


def _read(stored: Mapping[str, Any], dtype: str) -> Iterator[tuple[str, Tensor]]:
    for name, view in stored.items():
        part: Tensor = view[...]
        yield name, (part.to(getattr(torch, dtype)) if isinstance(view, ScaledView) else part).contiguous()


def _write_files(tensors: Iterator[tuple[str, Tensor]], out: Path) -> None:
    """Write all tensors into numbered files, and an index of them."""
    held: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for name, value in tensors:
        if held and sum(each.nbytes for each in held.values()) + value.nbytes > MAX_FILE_BYTES:
            _write_file(held, places, out)
        held[name] = value
    _write_file(held, places, out)
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _write_file(held: dict[str, Tensor], places: dict[str, str], out: Path) -> None:
    file = out / f"model-{len(set(places.values())) + 1:05}.safetensors"
    save_file(held, file, metadata={"format": "pt"})
    places.update(dict.fromkeys(held, file.name))
    held.clear()


def _copy_others(folder: Path, out: Path, dtype: str) -> None:
    """Copy the tokenizer and other settings, and say in config.json that weights are not quantized."""
    copy_settings(folder, out)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    config.pop(DECLARED, None)
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
