"""The stages' ranks: how states pass from stage to stage, and logits from the last one to rank 0.

The ranks of a stage have the same states, so its first rank sends them, to all ranks of the next stage. Knows
torch.distributed and no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from core.config import EngineConfig

Run: TypeAlias = Callable[[Callable[[], Any]], None]
"""Runs a collective, given a function that starts it."""


class Pipeline:
    """One rank's connections to other stages (a `StageLinks`), and the group of its own stage."""

    def __init__(self, rank: int, config: EngineConfig, timeout: timedelta, run: Run) -> None:
        """Called on all ranks together. Ranks of a stage follow one another."""
        self.num_ranks, num_stages = config.tensor_parallel, config.pipeline_parallel
        """Number of ranks of a stage."""
        stages = [range(first, first + self.num_ranks) for first in range(0, config.num_ranks, self.num_ranks)]
        self._rank, self._run, self._first_of_last = rank, run, stages[-1][0]
        own = rank // self.num_ranks
        self._sender = stages[own - 1][0]
        self._is_first_of_stage = rank == stages[own][0]

        def group(ranks: Iterable[int]) -> Any:  # each rank takes part in making each group
            return dist.new_group([*ranks], timeout=timeout)

        self.stage = [group(stage) for stage in stages][own] if num_stages > 1 else None
        """None stands for all ranks."""
        between = [group((before[0], *after)) for before, after in pairwise(stages)]
        self._before, self._after = (between[index] if 0 <= index < len(between) else None for index in (own - 1, own))
        self._ends = group((0, self._first_of_last)) if num_stages > 1 else None

    def receive(self, like: Tensor) -> Tensor:
        """The states of the stage before."""
        return self._broadcast(_empty(like), self._sender, self._before)

    def send(self, states: Tensor) -> None:
        """Send states to the stage after."""
        if self._is_first_of_stage:
            self._broadcast(states.contiguous(), self._rank, self._after)

    def logits(self, own: Tensor) -> Tensor:
        """On rank 0 the logits of the last stage; on other ranks their own."""
        if self._rank == self._first_of_last:
            return self._broadcast(own.contiguous(), self._rank, self._ends)
        return self._broadcast(_empty(own), self._first_of_last, self._ends) if self._rank == 0 else own

    def _broadcast(self, tensor: Tensor, sender: int, group: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        self._run(lambda: dist.broadcast(tensor, src=sender, group=group, async_op=True))
        return tensor


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
