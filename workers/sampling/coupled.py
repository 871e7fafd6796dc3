"""Batched coupled verification of trees; decides as `core.rules.coupled`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules.coupled import verify_coupled
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.batched import Decide, Outcomes, of_nodes
from workers.sampling.logits import Row
from workers.step import Readback, Uploads


def verify(blocks: Sequence[TokenTree], rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Decide:
    """Accept a guess if the target draws the same token with the shared noise. Greedy rows have no noise."""
    draw = sampler.prepare_draw(rows, vocab_size, uploads)

    def decide(log_p: Tensor, readback: Readback) -> Outcomes:
        samples = draw(log_p, readback)
        return lambda: [verify_coupled(*each) for each in zip(blocks, of_nodes(samples(), blocks), strict=True)]

    return decide
