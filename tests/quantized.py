"""Tiny checkpoints with quantized weights, packed as the published formats say: `write("AWQ", path)`.

`tests/workers/model/scaled` compares the same formats with the libraries that write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES

from tests import checkpoints

SINGLE = "model.safetensors"
FP8 = torch.float8_e4m3fn
BLOCK = [12, 20]
"""Divides no side of a weight, and no rank's part of one."""
GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Quantized: TypeAlias = tuple[dict[str, Tensor], Tensor]
"""Tensors by their suffixes after the module's name, and the floats that they stand for."""


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def words(values: Tensor, bits: int, axis: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned integers in words of 32 bits, the first in the lowest bits unless `order` says which."""
    num = 32 // bits
    parts = values.long().movedim(axis, -1).unflatten(-1, (-1, num))[..., list(order or range(num))]
    packed = (parts << torch.arange(0, 32, bits)).sum(-1).movedim(-1, axis)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().contiguous()


def _fp8(suffix: str, height: int | None, width: int | None) -> Callable[[Tensor], Quantized]:
    def quantize(weight: Tensor) -> Quantized:
        rows, columns = weight.shape
        high, wide = height or rows, width or columns
        scale = (torch.rand(-(-rows // high), -(-columns // wide)) + 0.1) / 50
        whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        values = (weight / whole).to(FP8)
        is_one = height is None
        return {".weight": values, suffix: scale.reshape(1) if is_one else scale}, values.float() * whole

    return quantize


def _integers(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [rows, columns], and scale and zero point of each row's groups [rows, groups]."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    values = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return values.flatten(1), scale, zero


def _floats(values: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    return (values - zero[:, groups]) * scale[:, groups]


def _w4a16(weight: Tensor) -> Quantized:
    """Symmetric, a group for each 16 columns."""
    scale = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7
    wide = scale.repeat_interleave(GROUP, 1)
    values = (weight / wide).round().clamp(-8, 7)
    parts = {".weight_packed": words(values + 8, 4, 1), ".weight_scale": scale}
    return parts | {".weight_shape": torch.tensor(weight.shape)}, values * wide


def _w4a16_asymmetric(weight: Tensor) -> Quantized:
    values, scale, zero = _integers(weight, 4, GROUP)
    parts = {".weight_packed": words(values, 4, 1), ".weight_scale": scale, ".weight_zero_point": words(zero, 4, 0)}
    groups = torch.arange(weight.shape[1]) // GROUP
    return parts | {".weight_shape": torch.tensor(weight.shape)}, _floats(values, scale, zero, groups)


def _w8a8(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    return {".weight": values.to(torch.int8), ".weight_scale": scale}, values * scale


def _gptq(bits: int) -> Callable[[Tensor], Quantized]:
    """First version, columns in another order."""

    def quantize(weight: Tensor) -> Quantized:
        order = torch.randperm(weight.shape[1])
        ordered, scale, zero = _integers(weight[:, order], bits, GROUP)
        values, g_idx = torch.empty_like(ordered), torch.empty_like(order)
        values[:, order], g_idx[order] = ordered, torch.arange(len(order)) // GROUP
        parts = {".qweight": words(values.T, bits, 0), ".qzeros": words(zero.T - 1, bits, 1)}
        parts |= {".scales": scale.T.half().contiguous(), ".g_idx": g_idx.int()}
        return parts, _floats(values, scale, zero, g_idx)

    return quantize


def _awq(weight: Tensor) -> Quantized:
    values, scale, zero = _integers(weight, 4, GROUP)
    parts = {".qweight": words(values.T, 4, 1, AWQ_ORDER), ".qzeros": words(zero.T, 4, 1, AWQ_ORDER)}
    groups = torch.arange(weight.shape[1]) // GROUP
    return parts | {".scales": scale.T.half().contiguous()}, _floats(values, scale, zero, groups)


def _fp4(weight: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Bytes, and the floats that they stand for."""
    wide = scale.repeat_interleave(group, 1)
    table = torch.tensor(FP4_VALUES)
    digits = ((weight / wide)[..., None] - table).abs().argmin(-1).to(torch.uint8)
    return digits[:, ::2] | digits[:, 1::2] << 4, table[digits.int()] * wide


def _nvfp4(weight: Tensor) -> Quantized:
    whole = torch.tensor([100.0])
    scale = (weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 6 * whole).to(FP8)
    packed, floats = _fp4(weight, scale.float() / whole, GROUP)
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole}, floats


def _mxfp4_experts(weight: Tensor) -> Quantized:
    """Experts are stored transposed: [experts, outputs, inputs]."""
    matrix = weight.transpose(1, 2).reshape(-1, weight.shape[1])
    exponents = (matrix.unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
    packed, floats = _fp4(matrix, 2**exponents, 32)
    experts, inputs, outputs = weight.shape
    blocks = packed.reshape(experts, outputs, inputs // 32, 16)
    scales = (exponents + 127).to(torch.uint8).reshape(experts, outputs, -1)
    return {"_blocks": blocks, "_scales": scales}, floats.reshape(experts, outputs, inputs).transpose(1, 2)


_INT = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
_FLOAT8 = {"type": "float", "num_bits": 8, "symmetric": True}
_BLOCKS = _FLOAT8 | {"strategy": "block", "block_structure": BLOCK}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": True}
KINDS: Mapping[str, tuple[Mapping[str, Any], Callable[[Tensor], Quantized]]] = {
    "DeepSeek": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK},
        _fp8(".weight_scale_inv", *BLOCK),
    ),
    "Mistral": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8(".weight_scale_inv", None, None)),
    "FP8 blocks": (compressed("float-quantized", **_BLOCKS), _fp8(".weight_scale", *BLOCK)),
    "FP8 rows": (compressed("float-quantized", **_FLOAT8, strategy="channel"), _fp8(".weight_scale", 1, None)),
    "FP8 weights": (compressed("float-quantized", **_FLOAT8, strategy="tensor"), _fp8(".weight_scale", None, None)),
    "W8A8": (compressed("int-quantized", type="int", num_bits=8, strategy="channel"), _w8a8),
    "W4A16": (compressed("pack-quantized", **_INT, symmetric=True), _w4a16),
    "W4A16 zero points": (compressed("pack-quantized", **_INT, symmetric=False), _w4a16_asymmetric),
    "GPTQ": (_GPTQ | {"bits": 4}, _gptq(4)),
    "GPTQ int8": (_GPTQ | {"bits": 8}, _gptq(8)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "NVFP4": (compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16), _nvfp4),
    "gpt-oss": ({"quant_method": "mxfp4"}, _mxfp4_experts),
}


def write(kind: str, path: Path, family: str = "llama", **sizes: Any) -> tuple[Path, Path]:
    """Two checkpoints of one tiny model: quantized, and with the floats that this stands for."""
    return quantize(kind, checkpoints.write(family, path / "original", **sizes), path)


def quantize(kind: str, original: Path, path: Path) -> tuple[Path, Path]:
    """The same of a checkpoint in one file."""
    scaled, plain = (Path(copytree(original, path / name)) for name in ("scaled", "plain"))
    declared, layout = KINDS[kind]
    stored = load_file(original / SINGLE)
    floats = dict(stored)
    torch.manual_seed(0)
    suffixes = ("_proj.weight",) if kind != "gpt-oss" else ("experts.down_proj", "experts.gate_up_proj")
    for name in [name for name in stored if name.endswith(suffixes)]:
        parts, whole = layout(stored.pop(name).float())
        floats[name] = whole.contiguous()
        stored |= {name.removesuffix(".weight") + part: value.contiguous() for part, value in parts.items()}
    for folder, tensors in ((scaled, stored), (plain, floats)):
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    config = json.loads((scaled / "config.json").read_text())
    (scaled / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return scaled, plain
