"""Experts in tiles of one shape, so that a row's bits do not depend on how many rows share its expert.

Knows transformers' interface for the code of experts. Must not know engines or steps.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from core.errors import ConfigError
from workers.attention import is_recorded

TILED: Final = "outrider_tiled"
TILE_ROWS: Final = 8
"""Rows of a product. A CPU reads an expert's weights once for all of them."""


def compute_in_tiles(model: Any) -> None:
    """Compute the experts of a mixture in tiles; other models are left alone.

    Raises: ConfigError if they are on a GPU, where no kernel does this.
    """
    if is_mixture(model):
        if model.device.type != "cpu":
            raise ConfigError(
                f"deterministic cannot be had on {model.device.type} with {type(model).__name__}, a mixture of experts:"
                " how many rows an expert gets depends on the other rows; set it to false"
            )
        model.set_experts_implementation(TILED)


def is_mixture(model: Any) -> bool:
    """Whether the model has experts behind transformers' interface."""
    return any(hasattr(module, "_is_expert_parallel") for module in model.modules())


def _experts(experts: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the outputs of each row's experts, added in the order in which they were chosen.

    # [T, D], [T, K], [T, K] -> [T, D]
    """
    if is_recorded():
        raise RuntimeError("experts in tiles cannot be recorded: which of them are computed depends on the rows")
    outputs = rows.new_zeros(*chosen.shape, rows.shape[1])  # [T, K, D]
    for expert in set(chosen.flatten().tolist()) & set(range(experts.num_experts)):  # others are on other ranks
        row, place = torch.where(chosen == expert)
        outputs[row, place] = _in_tiles(experts, expert, rows[row])
    weighted = (outputs * weights[..., None]).unbind(dim=1)
    return sum(weighted[1:], weighted[0]).to(rows.dtype)


def _in_tiles(experts: Any, expert: int, rows: Tensor) -> Tensor:
    tiles = functional.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS)).view(-1, TILE_ROWS, rows.shape[1])
    return torch.cat([_output(experts, expert, tile) for tile in tiles])[: len(rows)]


def _output(experts: Any, expert: int, tile: Tensor) -> Tensor:
    """One expert's output.  # [TILE_ROWS, D] -> [TILE_ROWS, D]"""
    first = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, tile)
    inner = experts._apply_gate(first) if experts.has_gate else experts.act_fn(first)
    output = _product(experts, "down_proj", expert, inner)
    return experts.post_expert_norm(output) if experts.has_post_expert_norm else output


def _product(experts: Any, name: str, expert: int, tile: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return functional.linear(tile, weight.t() if experts.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(TILED, _experts)
