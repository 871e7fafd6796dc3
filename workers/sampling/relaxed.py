"""Batched relaxed verification of trees; decides as `core.rules.lenient` and `core.rules.typical`.

Two numbers for each row and one for each guess are read back; functions of the reference decide by them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rules import Outcome, lenient, typical
from core.rules.relaxed import verify_relaxed
from core.speculation import TokenTree
from workers.sampling import sampler
from workers.sampling.batched import Decide, Outcomes, at_guesses, of_nodes, starts_of
from workers.sampling.logits import Row
from workers.step import Readback, Uploads


def verify_lenient(blocks: Sequence[TokenTree], rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Decide:
    """Lenient coupled verification. Greedy rows have no noise: their differences of scores are those of log p."""
    perturb, of_guess = sampler.prepare_perturbation(rows, vocab_size, uploads), at_guesses(blocks, vocab_size, uploads)

    def decide(log_p: Tensor, readback: Readback) -> Outcomes:
        scores = perturb(log_p)
        argmax, at = readback.argmax(scores), readback.add(of_guess(scores))

        def outcomes() -> list[Outcome]:
            samples, largest, of_guesses = (of_nodes(values, blocks) for values in (*argmax(), at()))
            return [
                verify_relaxed(
                    block,
                    samples[i],
                    lenient.merits(block, of_guesses[i][1:], largest[i], rows[start].lenience),
                )
                for i, (block, start) in enumerate(zip(blocks, starts_of(blocks), strict=True))
            ]

        return outcomes

    return decide


def verify_typical(blocks: Sequence[TokenTree], rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Decide:
    perturb, of_guess = sampler.prepare_perturbation(rows, vocab_size, uploads), at_guesses(blocks, vocab_size, uploads)

    def decide(log_p: Tensor, readback: Readback) -> Outcomes:
        wide = log_p.double()
        entropies = -(wide.exp() * wide.masked_fill(wide.isinf(), 0.0)).sum(dim=-1)
        argmax = readback.argmax(perturb(log_p))
        entropy, at = readback.add(entropies), readback.add(of_guess(log_p))

        def outcomes() -> list[Outcome]:
            samples, of_rows, of_guesses = (of_nodes(values, blocks) for values in (argmax()[0], entropy(), at()))
            return [
                verify_relaxed(block, samples[i], typical.merits(block, of_guesses[i][1:], of_rows[i]))
                for i, block in enumerate(blocks)
            ]

        return outcomes

    return decide
