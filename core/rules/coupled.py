"""Verification by the target's own token: greedy decoding, and coupled sampling with shared noise.

Source: Daliri, Musco, Suresh 2024 (arXiv 2408.07978). Batched: `workers.sampling.coupled`.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.noise import Purpose
from core.rules.rule import Float64, Outcome, Rule, draw
from core.speculation import ROOT, TokenTree


def verify_coupled(block: TokenTree, samples: Sequence[int]) -> Outcome:
    """Walk down from the root while a child equals the target's sample. The first sample without one is the next token.

    `samples[0]` is drawn after the root and `samples[i + 1]` after node i, with the shared noise of their positions.
    """
    path: list[int] = []
    node, sample = ROOT, samples[0]
    while (child := block.child(node, sample)) is not None:
        path.append(child)
        node, sample = child, samples[child + 1]
    return Outcome(tuple(path), sample, samples=tuple(samples))


def _decide_coupled(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    positions = [num_committed + depth for depth in (0, *block.depths)]
    samples = [draw(row, seed, at, 0, Purpose.SHARED) for row, at in zip(log_p, positions, strict=True)]
    return verify_coupled(block, samples)


def _decide_greedy(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    return verify_coupled(block, log_p.argmax(axis=1).tolist())


GREEDY = Rule(name="greedy", needs_q=False, takes_trees=True, is_lossless=True, decide=_decide_greedy)
COUPLED = Rule(
    name="coupled", needs_q=False, takes_trees=True, is_lossless=True, decide=_decide_coupled, at_zero=GREEDY
)
