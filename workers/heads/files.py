"""Reads a head's directory: `config.json` and `model.safetensors`.

Knows files and shapes; must not know the target's model beyond its configuration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from core.config import EngineConfig
from core.errors import CheckpointError, first_line
from workers.heads.blockwise import WEIGHT, BlockwiseHead

LAST_STATE = (-1,)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's `config.json`."""

    name: str
    """Name of its directory."""
    hidden_size: int
    """Of the target."""
    vocab_size: int
    """Rows of the target's output layer that are tokens."""
    feature_layers: tuple[int, ...]
    """Layers whose hidden states it reads; -1 is the last hidden state."""

    @property
    def feature_width(self) -> int:
        return len(self.feature_layers) * self.hidden_size

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        """Raises: CheckpointError for a target that this head was not trained for."""
        for what, own, target in (
            ("hidden_size", self.hidden_size, hidden_size),
            ("vocab_size", self.vocab_size, vocab_size),
        ):
            if own != target:
                raise CheckpointError(f"the head {self.name} is of another target: its {what} is {own}, not {target}")


def read_head(path: str) -> HeadConfig:
    """Raises: CheckpointError for a directory without a head, or with one of another kind."""
    file = Path(path) / "config.json"
    try:
        stored = json.loads(file.read_text())
        kind = stored["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} describes no head: {first_line(error) or type(error).__name__}") from error
    if kind != "blockwise":
        raise CheckpointError(f"{file}: model_type is {kind!r}; only blockwise heads are served")
    layers = tuple(stored.get("feature_layers", LAST_STATE))
    if layers != LAST_STATE:
        raise CheckpointError(f"{file}: feature_layers is {list(layers)}, but a blockwise head reads [-1]")
    hidden_size, vocab_size = (_size(stored, name, file) for name in ("hidden_size", "vocab_size"))
    return HeadConfig(Path(path).resolve().name, hidden_size, vocab_size, layers)


def tapped_layers(config: EngineConfig) -> tuple[int, ...]:
    """Layers whose hidden states a target's passes return: those for drafts, then others for its own head."""
    own = () if config.head is None else read_head(config.head).feature_layers
    return tuple(dict.fromkeys((*config.feature_layers, *own)))


def load_head(path: str, output: nn.Module, dtype: torch.dtype, device: torch.device) -> BlockwiseHead:
    """Load the head of a directory that `read_head` accepts, with the target's output layer.

    Raises: CheckpointError for missing, foreign or damaged weights.
    """
    config = read_head(path)
    weight = _read_weight(Path(path) / "model.safetensors")
    shape = (config.hidden_size, config.hidden_size)
    if tuple(weight.shape) != shape:
        raise CheckpointError(f"{WEIGHT} in {path} is {tuple(weight.shape)}, but config.json says {shape}")
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{WEIGHT} in {path} has NaN or infinite values")
    return BlockwiseHead(weight.to(device, dtype), output)


def _read_weight(file: Path) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            names = sorted(opened.keys())
            if names != [WEIGHT]:
                raise CheckpointError(
                    f"{file} has {', '.join(names) or 'no tensors'}, but a blockwise head is {WEIGHT}"
                )
            weight: Tensor = opened.get_tensor(WEIGHT)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or missing: {first_line(error)}") from error
    return weight


def _size(stored: dict[str, Any], name: str, file: Path) -> int:
    size = stored.get(name)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(f"{file}: {name} must be at least 1, got {size!r}")
    return size
