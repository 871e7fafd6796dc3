"""Reads the directory of a target's heads: `config.json` and one file of tensors.

Four kinds are known: "blockwise" heads, written by this project, Medusa's as they are published
(`medusa_lm_head.safetensors` or `.pt`), EAGLE's (`workers.heads.eagle_files`), and the MTP layer of a checkpoint
(`workers.heads.mtp`). Knows files and shapes; must not know the target beyond its sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from core.config import EngineConfig
from core.errors import CheckpointError, first_line
from workers.heads.eagle_files import EagleConfig, is_eagle, read_eagle
from workers.heads.eagle_settings import LAST_STATE
from workers.heads.mtp import MtpConfig, is_mtp, mtp_settings, read_mtp
from workers.heads.state_heads import LastStateConfig, Residual, StateHeads
from workers.heads.tensors import check_names, check_tensors, read_tensors
from workers.model import check_mtp

MAX_HEADS: Final = 16
MEDUSA_PREFIX: Final = "medusa_head."
"""Prefix of the tensors in Medusa-2's checkpoints; others have none."""


@dataclass(frozen=True, slots=True)
class HeadConfig(LastStateConfig):
    """Medusa's or Blockwise's heads of a directory."""

    is_medusa: bool
    num_heads: int
    num_layers: int
    """Residual layers of each head."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors."""
        square = (self.hidden_size, self.hidden_size)
        for head in range(self.num_heads):
            if not self.is_medusa:
                yield f"heads.{head}.weight", square
                continue
            for layer in range(self.num_layers):
                yield f"{head}.{layer}.linear.weight", square
                yield f"{head}.{layer}.linear.bias", (self.hidden_size,)
            yield f"{head}.{self.num_layers}.weight", (self.vocab_size, self.hidden_size)


def tapped_layers(config: EngineConfig) -> tuple[int, ...]:
    """Layers whose hidden states a target's passes return: those for drafts, then others for its own heads."""
    own = () if config.head is None else read_head(config.head, config.model).feature_layers
    return tuple(dict.fromkeys((*config.feature_layers, *own)))


def read_head(path: str, model: str | None = None) -> HeadConfig | EagleConfig | MtpConfig:
    """The head of a directory. `model`: directory of its target, for heads that do not name the layers they read.

    Raises: CheckpointError for a directory without heads, or with heads of another kind.
    """
    file = Path(path) / "config.json"
    try:
        stored = json.loads(file.read_text())
        kind = stored.get("model_type", "")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} describes no head: {first_line(error) or type(error).__name__}") from error
    name = Path(path).resolve().name
    if kind == "blockwise":
        _check_layers(stored, file)
        num_heads = _size(stored, "num_heads", file, MAX_HEADS) if "num_heads" in stored else 1
        hidden_size, vocab_size = (_size(stored, each, file) for each in ("hidden_size", "vocab_size"))
        return HeadConfig(name, hidden_size, vocab_size, False, num_heads, 1)
    if "medusa_num_heads" not in stored:
        if is_mtp(path, model):
            return read_mtp(path, stored)
        if is_eagle(stored):
            return read_eagle(path, stored, model)
        raise CheckpointError(f"{file}: model_type is {kind!r}; only blockwise, Medusa, EAGLE and MTP heads are served")
    num_heads, num_layers = (_size(stored, f"medusa_num_{each}", file, MAX_HEADS) for each in ("heads", "layers"))
    return _medusa(path, name, num_heads, num_layers)


def check_head(config: EngineConfig) -> None:
    """Check that the head of `config.head` is of the model of `config.model`, without reading weights.

    Raises: CheckpointError.
    """
    assert config.head is not None
    stored = json.loads((Path(config.model) / "config.json").read_text())
    sizes = stored.get("text_config") or stored
    if "hidden_size" in sizes and "vocab_size" in sizes:  # other names are compared when the head is loaded
        head = read_head(config.head, config.model)
        head.check_target(sizes["hidden_size"], sizes["vocab_size"])
        if isinstance(head, MtpConfig):
            check_mtp(mtp_settings(config))


def load_head(path: str, output: nn.Module, dtype: torch.dtype, device: torch.device) -> StateHeads:
    """Load the heads of a directory that `read_head` accepts. `output` is the target's output layer.

    Raises: CheckpointError for missing, foreign or damaged tensors.
    """
    config = read_head(path)
    assert isinstance(config, HeadConfig), "an EAGLE head has a loader of its own"
    stored = _tensors(path)
    wanted = dict(config.shapes())
    check_names(path, wanted, stored)
    tensors = {name: tensor.to(device, dtype) for name, tensor in stored.items()}
    check_tensors(path, wanted, tensors)
    return StateHeads([_head(config, number, tensors, output) for number in range(config.num_heads)], dtype)


def _head(config: HeadConfig, number: int, tensors: Mapping[str, Tensor], output: nn.Module) -> nn.Module:
    if not config.is_medusa:
        return nn.Sequential(Residual(tensors[f"heads.{number}.weight"], None, nn.Identity()), output)
    names = [f"{number}.{layer}.linear" for layer in range(config.num_layers)]
    layers = [Residual(tensors[f"{name}.weight"], tensors[f"{name}.bias"], nn.SiLU()) for name in names]
    weight = tensors[f"{number}.{config.num_layers}.weight"]
    own = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    own.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(*layers, own)


def _medusa(path: str, name: str, num_heads: int, num_layers: int) -> HeadConfig:
    """Medusa's configuration has no sizes; those of its first head's output layer are taken."""
    output = _tensors(path).get(f"0.{num_layers}.weight")
    if output is None or output.dim() != 2:
        raise CheckpointError(f"{path} has no output layer 0.{num_layers}.weight [vocab, hidden] of its first head")
    vocab_size, hidden_size = output.shape
    return HeadConfig(name, hidden_size, vocab_size, True, num_heads, num_layers)


def _tensors(path: str) -> dict[str, Tensor]:
    return {name.removeprefix(MEDUSA_PREFIX): tensor for name, tensor in read_tensors(path).items()}


def _check_layers(stored: Mapping[str, Any], file: Path) -> None:
    layers = stored.get("feature_layers", list(LAST_STATE))
    if layers != list(LAST_STATE):
        raise CheckpointError(f"{file}: feature_layers is {layers}, but blockwise heads read {list(LAST_STATE)}")


def _size(stored: Mapping[str, Any], name: str, file: Path, most: int = 1 << 24) -> int:
    size = stored.get(name)
    if not isinstance(size, int) or not 1 <= size <= most:
        raise CheckpointError(f"{file}: {name} must be in [1, {most}], got {size!r}")
    return size
