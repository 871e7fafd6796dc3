"""Batched coupled verification of trees; decides as `core.rules.coupled`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules.coupled import verify_coupled
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.batched import Outcomes, of_nodes
from workers.sampling.logits import Row
from workers.step import Readback


def follow(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """A guess is accepted if the target draws the same token with the shared noise; greedy rows have none."""
    samples = sampler.drawn(log_p, rows, readback)
    return lambda: [verify_coupled(*each) for each in zip(blocks, of_nodes(samples(), blocks), strict=True)]
