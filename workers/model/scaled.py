"""Weights in FP8 with scales beside them: each becomes a float tensor when it is read, whole or in part.

Knows the two layouts that are published: `quant_method` "fp8" (DeepSeek, Qwen), and compressed-tensors in the format
"float-quantized". Activations are not quantized: outputs are those of the dequantized weights. Must not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from core.errors import CheckpointError, UnsupportedModel

DECLARED = "quantization_config"
QUANTIZATION_KEYS = (DECLARED, "compression_config")
"""Keys of config.json that declare quantized weights."""
FP8 = "F8_E4M3"
SCALE_TYPES = frozenset({"F32", "F16", "BF16"})
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """How a checkpoint scales its weights."""

    suffix: str
    """What a scale's name has after the weight's name."""
    block: Shape | None = None
    """Rows and columns with one scale; None if a scale is for a row or for a whole weight."""

    def check_scale(self, path: Path, name: str, shape: Shape, scale: Shape) -> None:
        """Raises: CheckpointError for a scale of another shape than the weight needs; UnsupportedModel."""
        if len(shape) != 2:
            raise UnsupportedModel(f"{name} in {path} is {shape}; only matrices are scaled")
        rows, columns = shape
        if self.block is not None:
            allowed: tuple[Shape, ...] = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        else:
            allowed = ((rows, 1), (rows,), (1,), (), (1, 1))
        if scale not in allowed:
            raise CheckpointError(
                f"{name}{self.suffix} in {path} is {scale}, but a weight of {shape} needs {allowed[0]}"
            )


def read_scheme(path: Path, config: Mapping[str, Any]) -> ScaledWeights | None:
    """The scheme that a config.json declares; None without any. Raises: UnsupportedModel for all others."""
    for key in QUANTIZATION_KEYS:
        if declared := config.get(key):
            scheme = _scheme(declared) if key == DECLARED and isinstance(declared, Mapping) else None
            if scheme is None:
                method = declared.get("quant_method") if isinstance(declared, Mapping) else None
                kind = f" ({method})" if method else ""
                raise UnsupportedModel(
                    f"{path / 'config.json'} has a {key}{kind}: of quantized weights only fp8 with a scale for each "
                    "block, row or weight is served; use the checkpoint in bfloat16, float16 or float32"
                )
            return scheme
    return None


def _scheme(declared: Mapping[str, Any]) -> ScaledWeights | None:
    if declared.get("quant_method") == "fp8":
        block: Any = declared.get("weight_block_size")
        if declared.get("fmt", "e4m3") == "e4m3" and _is_block(block):
            return ScaledWeights("_scale_inv", tuple(block))
    if declared.get("quant_method") == "compressed-tensors" and declared.get("format") == "float-quantized":
        groups = [group.get("weights") or {} for group in (declared.get("config_groups") or {}).values()]
        found = {_compressed(weights) for weights in groups}
        return found.pop() if len(found) == 1 else None
    return None


def _compressed(weights: Mapping[str, Any]) -> ScaledWeights | None:
    if weights.get("type") != "float" or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
        return None
    if weights.get("strategy") in ("channel", "tensor"):
        return ScaledWeights("_scale")
    block: Any = weights.get("block_structure")
    is_block = weights.get("strategy") == "block" and _is_block(block)
    return ScaledWeights("_scale", tuple(block)) if is_block else None


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)


def views(files: Mapping[str, Any], scaled: ScaledWeights | None) -> dict[str, Any]:
    """Views of all tensors by name, from the file of each. Scales have none: they belong to their weights."""
    found = {name: file.get_slice(name) for name, file in files.items()}
    if scaled is not None:
        for name in files:
            if found[name].get_dtype() == FP8:
                found[name] = ScaledView(found[name], found[name + scaled.suffix], scaled.block)
        found = {name: view for name, view in found.items() if not _is_scale(name, found, scaled)}
    return found


def _is_scale(name: str, found: Mapping[str, Any], scaled: ScaledWeights) -> bool:
    return name.endswith(scaled.suffix) and isinstance(found.get(name.removesuffix(scaled.suffix)), ScaledView)


@dataclass(frozen=True, slots=True)
class ScaledView:
    """A file's view of a weight, whose parts are read as floats."""

    values: Any
    """A safetensors slice."""
    scale: Any
    block: Shape | None

    def __getitem__(self, index: Any) -> Tensor:
        """The product in float32 of this part of the weight with its scales."""
        part: Tensor = self.values[index].float()
        return part * self._scale_of(index)

    def _scale_of(self, index: Any) -> Tensor:
        """Scales that broadcast over the part."""
        scale: Tensor = self.scale[...].float()
        rows, columns = self.values.get_shape()
        height, width = self.block or (-(-rows // (scale.shape[0] if scale.ndim else 1)), columns)
        scale = scale.reshape(-(-rows // height), -(-columns // width))
        spans = index if isinstance(index, tuple) else (index, slice(None))
        row, column = (slice(None) if span is Ellipsis else span for span in spans)
        return scale[torch.arange(rows)[row] // height][:, torch.arange(columns)[column] // width]
