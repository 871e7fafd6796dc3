"""Weights of linear layers, laid out once in the blocks that the CPU's matrix kernels read.

torch multiplies by a weight as it lies, row by row. oneDNN, which every torch for x86 brings along, has kernels for
weights in blocks: two to three times as fast for the few rows of a verification, and near the memory's bandwidth for
one. They also add up each row in the same order however many rows there are, which deterministic steps are made of
(adr/0016). These are the operators that torch's own compiler emits for weights that do not change
(`torch._inductor.config.freezing`).

Knows modules and kernels. Must not know what the rows are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

MIN_WEIGHTS: Final = 1 << 19
"""Of a matrix that is worth it: a call into oneDNN costs 30 µs more."""
ROWS_IN_MIND: Final = 8
"""The layout is chosen for so many; it is not much worse for others."""


def is_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU, and this torch, have the kernels for `dtype`."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not has_onednn:
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False  # the operators may be there, on other machines, but with other kernels behind them
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(model: nn.Module, min_weights: int = MIN_WEIGHTS) -> tuple[int, int]:
    """Pack every linear layer with so many weights; how many were, and how many are left as they are.

    The `weight` of a packed layer is a stand-in: with both, a model would take twice its memory. Code may ask it for
    its shape, dtype and device, as some does; who computes with it gets NaN. What shares the weight, as an embedding
    may, keeps it.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    chosen = [layer for layer in layers if "forward" not in vars(layer) and layer.weight.numel() >= max(1, min_weights)]
    for index, layer in enumerate(chosen, len(packed(model))):
        layer.forward = PackedProduct(layer, index)  # what is hooked to the layer stays
        layer.weight = nn.Parameter(
            layer.weight.new_full((1, 1), torch.nan).expand_as(layer.weight), requires_grad=False
        )
    num_packed = sum("forward" in vars(layer) for layer in layers)
    return num_packed, len(layers) - num_packed


class PackedProduct:
    """The forward of a linear layer, with its weight in blocks."""

    def __init__(self, layer: Any, index: int = 0) -> None:
        """`index` is the layer's place among those of its model that are packed."""
        self.index = index
        weight = layer.weight.detach()
        if isinstance(layer, Conv1D):  # GPT-2's linear layer, whose weight is transposed
            weight = weight.t().contiguous()
        self.shape: tuple[int, int] = tuple(weight.shape)
        self.has_bias = layer.bias is not None
        self._bias = None if layer.bias is None else layer.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_IN_MIND)

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` times the weight, plus the bias.  # [..., in] -> [..., out]"""
        if torch.compiler.is_exporting():  # which knows no weights in blocks
            return torch.ops.outrider.linear(rows, self.index, self.shape[0])  # type: ignore[no-any-return]
        if not rows.numel():
            return rows.new_empty(*rows.shape[:-1], self.shape[0])
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product


def packed(model: nn.Module) -> list[PackedProduct]:
    """The products of the packed layers, in the order of their indices."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    return sorted((one for one in forwards if isinstance(one, PackedProduct)), key=lambda product: product.index)


@torch.inference_mode()
def warm_up(model: nn.Module, max_rows: int) -> None:
    """Let oneDNN make its kernels for up to `max_rows` rows: the first product of a shape takes a millisecond more."""
    products = {(product.shape, product.has_bias): product for product in packed(model)}
    dtype = next(model.parameters()).dtype
    for ((_, num_inputs), _), product in products.items():
        for num_rows in range(1, max_rows + 1):
            product(torch.zeros(1, num_rows, num_inputs, dtype=dtype))
