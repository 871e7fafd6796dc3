"""Layers of one input are fused and give what they gave, however they are called; others stay as they are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.products import fused, use_tiles
from workers.products.fused import FusedLinear, fuse_projections
from workers.products.linear import TiledLinear


class Owner(nn.Module):
    """Queries, keys and values, called in one of several ways."""

    def __init__(self, *, bias: tuple[bool, bool, bool] = (False, False, False)) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 12, bias[0]), nn.Linear(8, 4, bias[1])
        self.v_proj = nn.Linear(8, 4, bias[2])

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)], -1)


class InAnotherOrder(Owner):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([self.k_proj(rows), self.q_proj(rows), self.v_proj(rows)], -1)


class OfTwoInputs(Owner):
    def forward(self, rows: Tensor) -> Tensor:
        others = rows + 0.0
        return torch.cat([self.q_proj(rows), self.k_proj(others), self.v_proj(others)], -1)


class OneTwice(Owner):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + self.v_proj(rows).sum()


class OneLess(Owner):
    def forward(self, rows: Tensor) -> Tensor:
        return self.q_proj(rows)


ROWS = torch.arange(16.0).view(1, 2, 8)


def fuse(model: nn.Module) -> int:
    return fuse_projections(model, lambda: model(ROWS), is_tiled=False)


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_of_one_input_are_fused_and_give_the_same(*, has_bias: bool) -> None:
    owner = Owner(bias=(has_bias,) * 3)
    want, names = owner(ROWS), [name for name, _ in owner.named_parameters()]
    assert fuse(owner) == 1
    torch.testing.assert_close(owner(ROWS), want)
    assert [name for name, _ in owner.named_parameters()] == names
    storages = {weight.untyped_storage().data_ptr() for weight in (owner.q_proj.weight, owner.k_proj.weight)}
    assert len(storages) == 1, "one copy of the weights"


@torch.inference_mode()
@pytest.mark.parametrize(
    "owner", [InAnotherOrder(), OfTwoInputs(), OneTwice(), OneLess(), Owner(bias=(True, False, True))]
)
def test_others_are_left_as_they_are(owner: Owner) -> None:
    assert fuse(owner) == 0
    assert type(owner.q_proj) is nn.Linear


@torch.inference_mode()
def test_calls_unlike_those_of_the_example_get_their_own_product() -> None:
    """Other inputs, another order, and after a pass that ended between two members."""
    owner = Owner()
    parts: list[Any] = [nn.Linear(8, size, bias=False) for size in (12, 4, 4)]
    for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
        getattr(owner, name).weight.data = part.weight.data
    assert fuse(owner) == 1
    others = ROWS + 1
    owner.q_proj(ROWS)  # and no more
    torch.testing.assert_close(owner.k_proj(others), parts[1](others))
    torch.testing.assert_close(owner.v_proj(ROWS), parts[2](ROWS))
    torch.testing.assert_close(owner.v_proj(ROWS), parts[2](ROWS))
    torch.testing.assert_close(owner(others), torch.cat([part(others) for part in parts], -1))


@torch.inference_mode()
def test_each_fusion_frees_the_weights_that_it_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(Owner(), nn.Linear(20, 8)) for _ in range(3)))
    weights = [weakref.ref(each[0].q_proj) for each in model]
    alive: list[int] = []
    own = fused._fuse

    def counted(*args: Any, **settings: Any) -> None:
        own(*args, **settings)
        alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(fused, "_fuse", counted)
    assert fuse(model) == 3
    assert alive == [2, 1, 0]


@torch.inference_mode()
def test_plain_linear_layers_are_tiled_and_fused_ones_stay() -> None:
    model = nn.Sequential(Owner(), nn.Linear(20, 8))
    want = model(ROWS)
    fuse(model)
    use_tiles(model, is_tiled=True)
    assert type(model[0].q_proj) is FusedLinear
    assert type(model[1]) is TiledLinear
    torch.testing.assert_close(model(ROWS), want)
