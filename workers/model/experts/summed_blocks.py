"""Blocks of experts whose ranks add up the block's output once, instead of that of each module in it.

A block adds the outputs of its routed and of its shared experts. Both are sums over ranks, so that one all-reduce of
their sum does. Knows modules and shards; must not know how ranks communicate.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.model.experts.parameter_shards import ParameterShards

if TYPE_CHECKING:
    from workers.model.shards.sharding import Shard

NUM_ROWS = 4
FACTOR = -2
"""A power of two, so that it changes no digit, and negative, so that it would show in an activation."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """In place of collectives: multiplies by a factor."""

    factor: int
    exchange: None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor * self.factor

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError(f"a block of experts gathers nothing, not even {tensor.shape}")


def summed_blocks(model: Any, shards: Mapping[str, Shard]) -> Iterator[str]:
    """Names of the blocks with several sums over ranks, whose output is their sum. Needs weights."""
    for name, shard in shards.items():
        block, _, _ = name.rpartition(".")
        if isinstance(shard, ParameterShards) and shard.is_summed:
            inside = [other for key, other in shards.items() if key.startswith(f"{block}.") and other.is_summed]
            rows = torch.randn(1, NUM_ROWS, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
            rows = rows.to(model.device, model.dtype)
            if len(inside) > 1 and _adds_up(model.get_submodule(block), inside, rows):
                yield block


def _adds_up(block: Any, inside: Sequence[Shard], rows: Tensor) -> bool:
    """Whether the block's output is multiplied by what all sums in it are multiplied by, on this rank, in each bit."""
    has_attention = any(hasattr(module, "layer_idx") for module in block.modules())
    if has_attention or len(inspect.signature(block.forward).parameters) != 1:
        return False
    once, scaled = (_output(block, inside, rows, factor) for factor in (1, FACTOR))
    if not isinstance(once, Tensor):
        return False
    return torch.equal(once * FACTOR, scaled)


@torch.inference_mode()
def _output(block: Any, inside: Sequence[Shard], rows: Tensor, factor: int) -> Tensor:
    hooks = [hook for shard in inside for hook in shard.hooks(Scaled(factor))]
    try:
        output: Tensor = block(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return output
