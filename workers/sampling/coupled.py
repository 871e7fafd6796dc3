"""Verification of a batch of trees by what the target draws: the twin of `core.rules.coupled`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules.coupled import verify_coupled
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.sampler import Row
from workers.sampling.twin import Outcomes, starts_of
from workers.step import Readback


def follow_samples(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """The twin of coupled."""
    return _follow(blocks, sampler.sample_coupled(log_p, rows), readback)


def follow_argmax(blocks: Sequence[TokenTree], scores: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:  # noqa: ARG001
    """The twin of greedy, which asks for no distribution."""
    return _follow(blocks, sampler.argmax(scores), readback)


def _follow(blocks: Sequence[TokenTree], samples: Tensor, readback: Readback) -> Outcomes:
    """By what the target draws after the root and each node of each block.  # [R]"""
    drawn = readback.ask(samples)
    return lambda: [
        verify_coupled(block, drawn.values[start : start + 1 + len(block)])
        for block, start in zip(blocks, starts_of(blocks), strict=True)
    ]
