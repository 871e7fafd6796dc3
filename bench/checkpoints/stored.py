"""Quantized weights as published checkpoints store them, and the weights that they stand for.

Written from the formats' descriptions, not from the code that reads them. Must not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Stored: TypeAlias = dict[str, Tensor]
Weights: TypeAlias = tuple[Stored, Tensor]
"""The tensors stored for a weight, by the end of their names, and the weight that they stand for."""
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Ends of the names of weights that are quantized as matrices."""
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of weights that MXFP4 is made for."""
GROUP, BITS, PER_INT32 = 128, 4, 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns in the bits of an integer, four bits each, from the lowest."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK, MX_BIAS = 32, 127


def quantized(tensors: Mapping[str, Tensor], declared: Mapping[str, Any]) -> tuple[Stored, Stored]:
    """The tensors as a checkpoint with this `quantization_config` stores them, and as they are meant."""
    method = declared["quant_method"]
    store, ends = (_mxfp4, EXPERTS) if method == "mxfp4" else (METHODS[method], LINEAR)
    stored: Stored = {}
    meant: Stored = {}
    for name, value in tensors.items():
        if name.endswith(ends) and ".layers." in name and "vision" not in name and "weights_proj" not in name:
            parts, meant[name] = store(value.float())
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = meant[name] = value
    return stored, meant


def _fp8_blocks(weight: Tensor) -> Weights:
    """Blocks of 128 x 128 with a scale each."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // GROUP), -(-columns // GROUP))
    for row, column in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = weight[row * GROUP : (row + 1) * GROUP, column * GROUP : (column + 1) * GROUP]
        scales[row, column] = 2.0 ** torch.log2(block.abs().amax() / 448).ceil()
    spread = scales.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": values, ".weight_scale_inv": scales}, values.float() * spread


def _grouped(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of four bits around 8, and a scale for each 128 columns of a row.  # [out, in], [out, in / 128]"""
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).half().float()
    integers = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1) + 8
    return integers.int(), scales


def _meant(integers: Tensor, zeros: int | Tensor, scales: Tensor) -> Tensor:
    meant: Tensor = (integers - zeros) * scales.repeat_interleave(GROUP, 1)
    return meant


def _packed(integers: Tensor, order: Sequence[int] = range(PER_INT32)) -> Tensor:
    """Eight integers of the last dimension in one, in this order from the lowest bits on."""
    eights = integers.reshape(*integers.shape[:-1], -1, PER_INT32).long()
    words = sum(eights[..., place] << BITS * shift for shift, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _awq(weight: Tensor) -> Weights:
    integers, scales = _grouped(weight)
    zeros = torch.full_like(scales, 8, dtype=torch.int32)
    zeros[:, ::2] = 7  # they differ between groups
    meant = _meant(integers, zeros.repeat_interleave(GROUP, 1), scales)
    parts = {".qweight": _packed(integers.T, AWQ_ORDER), ".qzeros": _packed(zeros.T, AWQ_ORDER)}
    return parts | {".scales": scales.T.half()}, meant


def _gptq(weight: Tensor) -> Weights:
    integers, scales = _grouped(weight)
    zeros = torch.full_like(scales, 7, dtype=torch.int32)  # one less than is meant
    parts = {
        ".qweight": _packed(integers).T,
        ".qzeros": _packed(zeros.T),
        ".scales": scales.T.half(),
        ".g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return parts, _meant(integers, 8, scales)


def _packed_groups(weight: Tensor) -> Weights:
    """compressed-tensors in the format "pack-quantized"."""
    integers, scales = _grouped(weight)
    scales = scales.bfloat16().float()
    parts = {
        ".weight_packed": _packed(integers),
        ".weight_scale": scales.bfloat16(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, _meant(integers, 8, scales)


def _mxfp4(weight: Tensor) -> Weights:
    """Blocks of 32 inputs with a power of two each, of experts whose weights are [E, in, out]."""
    experts, inputs, outputs = weight.shape
    blocks = weight.transpose(1, 2).reshape(experts, outputs, inputs // MX_BLOCK, MX_BLOCK)
    exponents = torch.log2(blocks.abs().amax(3, keepdim=True) / FP4_VALUES[-1]).ceil()
    scaled = blocks / 2.0**exponents
    values = torch.tensor(FP4_VALUES)
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1)
    meant = values[codes] * scaled.sign() * 2.0**exponents
    signed = codes + 8 * (scaled < 0)
    pairs = signed[..., ::2] + (signed[..., 1::2] << BITS)
    parts = {"_blocks": pairs.to(torch.uint8), "_scales": (exponents[..., 0] + MX_BIAS).to(torch.uint8)}
    return parts, meant.flatten(2).transpose(1, 2).contiguous()


METHODS: Mapping[str, Callable[[Tensor], Weights]] = {
    "fp8": _fp8_blocks,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _packed_groups,
}
