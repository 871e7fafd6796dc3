"""Fuses the products of linear layers that share their input: queries, keys and values; gate and up.

One product with all the weights takes one kernel in place of three, and uses more of the memory bandwidth. A small
forward pass finds the layers that may be fused: they belong to one module and get the same tensor, one after the
other.

Knows linear layers. Must not know attention, nor which model it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from workers.products.linear import product

FUSED_PROJECTIONS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that transformers gives to linear layers with the same input."""


class FusedWeights:
    """Concatenated weights of several linear layers; the first layer called computes the product for all."""

    def __init__(self, members: Sequence[nn.Linear], *, is_tiled: bool) -> None:
        self.is_tiled = is_tiled
        self.weight = torch.cat([member.weight.data for member in members])
        biases = [None if member.bias is None else member.bias.data for member in members]
        self.bias = None if biases[0] is None else torch.cat(biases)
        self.latest: tuple[Tensor, Tensor] | None = None
        """The input and its product, until the last member has taken its part."""


class FusedLinear(nn.Module):
    """One of several linear layers whose product is computed by the first of them."""

    def __init__(self, fused: FusedWeights, first: int, end: int) -> None:
        super().__init__()
        self._fused, self._first, self._end = fused, first, end
        self._is_last = end == len(fused.weight)
        self.in_features, self.out_features = fused.weight.shape[1], end - first
        self.weight = nn.Parameter(fused.weight[first:end], requires_grad=False)
        self.bias = None if fused.bias is None else nn.Parameter(fused.bias[first:end], requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        fused = self._fused
        if self._first == 0:
            fused.latest = rows, product(rows, fused.weight, fused.bias, is_tiled=fused.is_tiled)
        latest = fused.latest
        if self._is_last:
            fused.latest = None
        if latest is None or latest[0] is not rows:  # called in another way than in the example
            return product(rows, self.weight, self.bias, is_tiled=fused.is_tiled)
        return latest[1][..., self._first : self._end]


@torch.inference_mode()
def fuse_projections(model: Any, example: Callable[[], object], *, is_tiled: bool) -> int:
    """Fuse all layers that can be fused; `example` runs a small forward pass. Returns the number of fused products.

    `is_tiled` as in `workers.products.linear`.
    """
    candidates = [
        (owner, names)
        for owner in model.modules()
        for names in FUSED_PROJECTIONS
        if all(_can_be_fused(getattr(owner, name, None)) for name in names)
    ]
    calls: list[tuple[nn.Module, Tensor]] = []
    with ExitStack() as hooks:
        for owner, names in candidates:
            for name in names:
                handle = getattr(owner, name).register_forward_pre_hook(
                    lambda layer, rows: calls.append((layer, rows[0]))
                )
                hooks.callback(handle.remove)
        example()
    fused = [(owner, names) for owner, names in candidates if _are_called_together(owner, names, calls)]
    calls.clear()  # it refers to the layers: their weights would stay in memory until all are fused
    for owner, names in fused:
        _fuse(owner, names, is_tiled=is_tiled)
    return len(fused)


def _can_be_fused(module: Any) -> bool:
    """Whether a module is a linear layer without hooks, such as those that gather its outputs from ranks."""
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


def _are_called_together(owner: Any, names: Sequence[str], calls: Sequence[tuple[nn.Module, Tensor]]) -> bool:
    """Whether the layers are called once each, in this order, with the same tensor, and all or none have a bias."""
    members = [getattr(owner, name) for name in names]
    found = [(layer, rows) for layer, rows in calls if any(layer is member for member in members)]
    is_in_order = len(found) == len(members) and all(
        layer is member for (layer, _), member in zip(found, members, strict=True)
    )
    return (
        is_in_order
        and all(rows is found[0][1] for _, rows in found)
        and len({member.bias is None for member in members}) == 1
    )


def _fuse(owner: Any, names: Sequence[str], *, is_tiled: bool) -> None:
    members = [getattr(owner, name) for name in names]
    weights = FusedWeights(members, is_tiled=is_tiled)
    for name, (first, end) in zip(names, _ranges(members), strict=True):
        setattr(owner, name, FusedLinear(weights, first, end))


def _ranges(members: Sequence[nn.Linear]) -> Iterator[tuple[int, int]]:
    first = 0
    for member in members:
        yield first, first + len(member.weight)
        first += len(member.weight)
