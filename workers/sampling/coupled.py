"""Batched coupled verification of trees; decides as `core.rules.coupled`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules import Outcome
from core.rules.coupled import verify_coupled
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.batched import Outcomes, of_nodes
from workers.sampling.sampler import Row
from workers.step import Readback


def follow_samples(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """Coupled verification: a guess is accepted if the target draws the same token with the shared noise."""
    return _follow(blocks, sampler.perturbed(log_p, rows), readback)


def follow_argmax(blocks: Sequence[TokenTree], scores: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:  # noqa: ARG001
    """Greedy verification, by scores alone: `scores` [R, V] need not be a distribution."""
    return _follow(blocks, scores, readback)


def _follow(blocks: Sequence[TokenTree], scores: Tensor, readback: Readback) -> Outcomes:
    """The target's token after the root and after each node is the one with the largest score [R, V]."""
    argmax = readback.argmax(scores)

    def outcomes() -> list[Outcome]:
        samples, _ = argmax()
        return [verify_coupled(*each) for each in zip(blocks, of_nodes(samples, blocks), strict=True)]

    return outcomes
