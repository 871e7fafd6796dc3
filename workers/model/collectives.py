"""How the ranks of a model combine their results: the interface, and its form without other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Collectives(Protocol):
    """Collectives of a model's ranks. All ranks make the same calls in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, concatenated in the last dimension."""
        ...


@dataclass(frozen=True, slots=True)
class LocalCollectives:
    """Results of the right shapes without other ranks, to probe a model before the ranks have met."""

    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size, dim=-1)
