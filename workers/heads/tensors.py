"""The file of tensors in a head's directory: found, read without executing anything, and checked by name.

Must not know what the tensors mean.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from core.errors import CheckpointError, first_line

FILES: Final = ("model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
"""Files that tensors are read from; the first that exists."""


def read_tensors(path: str) -> dict[str, Tensor]:
    """All tensors, mapped from their file. Raises: CheckpointError."""
    file = next((Path(path) / name for name in FILES if (Path(path) / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{path} has none of {', '.join(FILES)}")
    try:
        return load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{file} is damaged, or no file of tensors alone: {first_line(error)}") from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A pickle of tensors alone: nothing in it is executed."""
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored):
        raise pickle.UnpicklingError("it is no state dict")
    if not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise pickle.UnpicklingError("it has values that are no tensors")
    return stored


def check_names(path: str, wanted: Iterable[str], stored: Iterable[str]) -> None:
    """Raises: CheckpointError for tensors that are missing or too many."""
    missing, left = sorted({*wanted} - {*stored}), sorted({*stored} - {*wanted})
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of its heads, the first is {missing[0]}")
    if left:
        raise CheckpointError(f"{path} has {len(left)} tensors too many for its heads, the first is {left[0]}")


def check_tensors(path: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Raises: CheckpointError for a wrong shape, and for NaN or infinite values."""
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(f"{name} in {path} is {tuple(tensors[name].shape)}, but should be {shape}")
        if not bool(tensors[name].isfinite().all()):
            raise CheckpointError(f"{name} in {path} has NaN or infinite values")
