"""Typical acceptance of a batch of trees: the twin of `core.rules.typical`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules import Outcome
from core.rules import typical as reference
from core.rules.relaxed import verify_relaxed
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.sampler import Row
from workers.sampling.twin import Outcomes, at_guesses, of_nodes
from workers.step import Readback


def follow_typical(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """The twin of typical acceptance."""
    wide = log_p.double()
    entropies = -(wide.exp() * wide.masked_fill(wide.isinf(), 0.0)).sum(dim=-1)
    asked = [readback.ask(part) for part in (sampler.sample_coupled(log_p, rows), entropies, at_guesses(log_p, blocks))]

    def outcomes() -> list[Outcome]:
        samples, of_rows, of_guesses = (of_nodes(wanted.values, blocks) for wanted in asked)
        return [
            verify_relaxed(block, samples[i], reference.merits(block, of_guesses[i][1:], of_rows[i]))
            for i, block in enumerate(blocks)
        ]

    return outcomes
