"""Batched coupled verification of trees; decides as `core.rules.coupled`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules.coupled import verify_coupled
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.batched import Outcomes, starts_of
from workers.sampling.sampler import Row
from workers.step import Readback


def follow_samples(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """Coupled verification: a guess is accepted if the target draws the same token with the shared noise."""
    return _follow(blocks, sampler.sample_coupled(log_p, rows), readback)


def follow_argmax(blocks: Sequence[TokenTree], scores: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:  # noqa: ARG001
    """Greedy verification, by scores alone: `scores` [R, V] need not be a distribution."""
    return _follow(blocks, sampler.argmax(scores), readback)


def _follow(blocks: Sequence[TokenTree], samples: Tensor, readback: Readback) -> Outcomes:
    """`samples` [R]: the target's token after the root and each node of each block."""
    drawn = readback.ask(samples)
    return lambda: [
        verify_coupled(block, drawn.values[start : start + 1 + len(block)])
        for block, start in zip(blocks, starts_of(blocks), strict=True)
    ]
