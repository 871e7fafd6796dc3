"""Packed weights: weights of linear layers in the blocked layout that the CPU's matrix kernels read.

torch multiplies by weights in row-major layout. oneDNN, part of every torch for x86, has kernels for weights in blocks.
They are two to three times as fast for the few rows of a verification, and near the memory bandwidth for one row. They
also sum each row in the same order for any number of rows, which deterministic steps need (adr/cpu-runtime). torch's
own compiler emits the same operators for weights that do not change (`torch._inductor.config.freezing`).

Knows modules and kernels. Must not know what the rows stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from workers.attention import READS_SOURCE, is_recorded
from workers.recurrent import WEIGHT_IS_READ

MIN_WEIGHTS: Final = 1 << 19
"""Smallest matrix, in weights, that is worth packing: a call into oneDNN costs 30 µs more."""
FUSED_PROJECTIONS: Final = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Names of layers that take the same input rows: one product reads their weights faster than three."""
LAYOUT_ROWS: Final = 8
"""Number of rows that the layout is chosen for; it is not much worse for others."""
TILE_UNIT_ROWS: Final = 32
"""A CPU's tile unit (AMX) sums products of up to this number of rows in one order; above, the order depends on the
shape. In parts of 32 rows, 64 rows take 1.7 times as long and 256 rows 3.6 times; without the unit 256 take ten times
as long."""


def is_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU, and this torch, have the kernels for `dtype`."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not has_onednn:
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False  # on other CPUs the operators may exist, but with slower kernels
    return dtype in (torch.float32, torch.bfloat16)


def has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 matrix products."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_tile_unit() -> bool:
    """Whether this CPU has a tile unit for bfloat16 products (AMX)."""
    return has_bfloat16() and bool(torch.cpu.get_capabilities().get("amx_bf16"))


def bytes_needed(model: nn.Module, *, keeps_rows: bool) -> int:
    """Bytes that `pack` takes in addition to the current weights."""
    if next(model.parameters()).dtype != torch.bfloat16 or has_bfloat16():
        return 0
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    num_bytes = 0
    for layer in _layers(model):
        stays = keeps_rows or id(layer.weight) in embeddings
        num_bytes += layer.weight.numel() * (4 if stays else 2)
    return num_bytes


def pack(
    model: nn.Module, min_weights: int = MIN_WEIGHTS, *, keeps_rows: bool = True, max_rows: int | None = None
) -> tuple[int, int]:
    """Pack each linear layer of at least `min_weights`. Returns the numbers of packed and of unpacked layers.

    Layers with the same input are fused into one product. The `weight` of a packed layer is replaced by a placeholder
    of NaN with its shape, dtype and device, because keeping both would take twice the memory. Another module that
    shares the weight, such as an embedding, keeps it.
    `keeps_rows`: on a CPU that has to widen bfloat16, multiply single rows by the original weights.
    `max_rows`: largest number of rows multiplied at once; None for any number.
    """
    is_widened = next(model.parameters()).dtype == torch.bfloat16 and not has_bfloat16()
    make = partial(WidenedProduct, keeps_rows=keeps_rows) if is_widened else partial(PackedProduct, max_rows=max_rows)
    layers = _layers(model)
    left = [layer for layer in layers if "forward" not in vars(layer) and layer.weight.numel()]
    index = len(packed(model))
    for group in _groups(model, left):
        if sum(layer.weight.numel() for layer in group) < min_weights:
            continue
        product, first = make(group, index), 0
        fused = FusedProduct(product, len(group))
        for layer in group:  # the layer stays a module and keeps its hooks
            num_outputs = _weight(layer).shape[0]
            layer.forward = FusedOutput(fused, slice(first, first + num_outputs)) if len(group) > 1 else product
            layer.weight = nn.Parameter(
                layer.weight.new_full((1, 1), torch.nan).expand_as(layer.weight), requires_grad=False
            )
            first += num_outputs
        index += 1
    num_packed = sum("forward" in vars(layer) for layer in layers)
    return num_packed, len(layers) - num_packed


def _layers(model: nn.Module) -> list[Any]:
    linear = (module for module in model.modules() if type(module) in (nn.Linear, Conv1D))
    return [module for module in linear if not hasattr(module, WEIGHT_IS_READ)]


def _groups(model: nn.Module, layers: Sequence[Any]) -> Iterator[list[Any]]:
    """Groups of layers to fuse, and all other layers one by one."""
    rest = dict.fromkeys(layers)
    for parent in model.modules():
        for names in FUSED_PROJECTIONS:
            if hasattr(parent, READS_SOURCE):  # keys and values of cross-attention are not computed with queries
                continue
            group = [child for name, child in parent.named_children() if name in names and child in rest]
            if len({(type(layer), layer.bias is None, _weight(layer).shape[1]) for layer in group}) == 1:
                for layer in group:
                    del rest[layer]
                yield group
    yield from ([layer] for layer in rest)


def _weight(layer: Any) -> Tensor:
    """# [out, in]"""
    weight: Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight  # GPT-2's linear layer is transposed


class PackedProduct:
    """The forward of a linear layer, or of several with the same input rows, with the weights in blocks."""

    def __init__(self, layers: Sequence[Any], index: int = 0, max_rows: int | None = None) -> None:
        """`index`: number of this product in the model; `max_rows`: as in `pack`."""
        self.index = index
        self._max_rows = max_rows
        weights = [_weight(layer) for layer in layers]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.has_bias = layers[0].bias is not None
        self._take(weight, torch.cat([layer.bias.detach() for layer in layers]) if self.has_bias else None)

    def _take(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` times the weight, plus the bias.  # [..., in] -> [..., out]"""
        if is_recorded():  # recorded code cannot hold packed weights, so it calls an operator
            return torch.ops.outrider.linear(rows, self.index, self.shape[0])  # type: ignore[no-any-return]
        return self.multiply(rows)

    def multiply(self, rows: Tensor) -> Tensor:
        """`__call__` without recording; the operator calls it, too."""
        if not rows.numel():
            return rows.new_empty(*rows.shape[:-1], self.shape[0])
        num_rows = rows.numel() // rows.shape[-1]
        if self._max_rows is None or num_rows <= self._max_rows:
            return self._multiply(rows)
        flat = rows.reshape(num_rows, -1)
        parts = [self._multiply(flat[first : first + self._max_rows]) for first in range(0, num_rows, self._max_rows)]
        return torch.cat(parts).view(*rows.shape[:-1], -1)

    def _multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product


class WidenedProduct(PackedProduct):
    """For bfloat16 on a CPU without bfloat16 instructions, where 8 rows would take 7 times as long as one.

    It multiplies in float32 and rounds the result, as such instructions do. A single row's time is that of reading the
    weights, so the bfloat16 weights are kept for single rows.
    """

    def __init__(self, layers: Sequence[Any], index: int = 0, *, keeps_rows: bool = True) -> None:
        self._keeps_rows = keeps_rows
        super().__init__(layers, index)

    def _take(self, weight: Tensor, bias: Tensor | None) -> None:
        self._rows = (weight, bias) if self._keeps_rows else None
        super()._take(weight.float(), None if bias is None else bias.float())

    def _multiply(self, rows: Tensor) -> Tensor:
        if self._rows is not None and rows.numel() == rows.shape[-1]:
            return functional.linear(rows, *self._rows)
        return super()._multiply(rows.float()).to(rows.dtype)


class FusedProduct:
    """One product for several layers: the first layer called computes for all of them.

    Invariant: no code changes the rows in place between two fused layers in one pass; no served model does.
    """

    def __init__(self, product: PackedProduct, num_layers: int) -> None:
        self.product = product
        self._num_parts = num_layers
        self._rows: Tensor | None = None
        self._outputs: Tensor | None = None
        self._num_taken = 0

    def __call__(self, rows: Tensor) -> Tensor:
        """The product of `rows`, computed once for all layers that are called with the same tensor."""
        if self._outputs is None or rows is not self._rows:
            self._rows, self._outputs, self._num_taken = rows, self.product(rows), 0
        outputs = self._outputs
        self._num_taken += 1
        if self._num_taken == self._num_parts:
            self._rows = self._outputs = None
        return outputs


class FusedOutput:
    """The forward of one of the layers of a fused product."""

    def __init__(self, fused: FusedProduct, outputs: slice) -> None:
        self.fused = fused
        self._outputs = outputs

    def __call__(self, rows: Tensor) -> Tensor:
        """# [..., in] -> [..., out]"""
        return self.fused(rows)[..., self._outputs]


def packed(model: nn.Module) -> list[PackedProduct]:
    """The products of the packed layers, in the order of their indices."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    products = {one.fused.product if isinstance(one, FusedOutput) else one: None for one in forwards}
    return sorted((one for one in products if isinstance(one, PackedProduct)), key=lambda product: product.index)


@torch.inference_mode()
def warm_up(model: nn.Module, max_rows: int) -> None:
    """Make oneDNN's kernels for up to `max_rows` rows: the first product of each shape takes 1 ms more."""
    products = {(product.shape, product.has_bias): product for product in packed(model)}
    dtype = next(model.parameters()).dtype
    for ((_, num_inputs), _), product in products.items():
        for num_rows in range(1, max_rows + 1):
            product(torch.zeros(1, num_rows, num_inputs, dtype=dtype))
