"""Linear layers whose product is an operator: in tiles of 16 rows if rows are few, else by torch's library.

A decoding step reads all weights for a few rows, and torch's library leaves a tenth of the memory bandwidth unused. In
deterministic mode every product is computed in tiles: an element's bits then depend only on its row and its weights,
not on the number of rows.

Knows linear layers and torch's operator registry. Must not know models.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_ROWS: Final = 16
"""Rows up to which the tiles are faster than torch's library, measured on an H200 (docs/adr/gpu-runtime)."""

_LIBRARY: Any = torch.library.Library("outrider", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("product(Tensor rows, Tensor weight, Tensor? bias, bool is_tiled) -> Tensor")


def _on_host(rows: Tensor, weight: Tensor, bias: Tensor | None, is_tiled: bool) -> Tensor:  # noqa: ARG001
    return F.linear(rows, weight, bias)


def _on_gpu(rows: Tensor, weight: Tensor, bias: Tensor | None, is_tiled: bool) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    if not is_tiled and len(flat) > FEW_ROWS:
        return F.linear(rows, weight, bias)
    from workers.products.triton_product import product  # Triton comes with torch for CUDA

    return product(flat, weight, bias).view(*rows.shape[:-1], len(weight))


_LIBRARY.impl("product", _on_host, "CPU")
_LIBRARY.impl("product", _on_gpu, "CUDA")
_LIBRARY.impl("product", lambda rows, weight, *_: rows.new_empty(*rows.shape[:-1], len(weight)), "Meta")


class TiledLinear(nn.Linear):
    """A linear layer computed by the operator."""

    is_tiled: bool
    """Whether products of any number of rows are computed in tiles."""

    def forward(self, rows: Tensor) -> Tensor:
        return product(rows, self.weight, self.bias, is_tiled=self.is_tiled)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, *, is_tiled: bool) -> Tensor:
    """`F.linear` through the operator."""
    found: Tensor = torch.ops.outrider.product(rows, weight, bias, is_tiled)
    return found


def use_tiles(model: nn.Module, *, is_tiled: bool) -> None:
    """Make every plain linear layer of the model use the operator; `is_tiled` as in `TiledLinear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TiledLinear
            module.is_tiled = is_tiled  # type: ignore[assignment]  # torch types a module's attributes
