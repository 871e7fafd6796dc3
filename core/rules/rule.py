"""What a rule of verification is: which guesses of a block stand, and which token of the target's own follows.

Knows blocks, log p and the noise; must not know sessions, models, or who guessed. Proofs: docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core import noise
from core.noise import Purpose
from core.speculation import TokenTree

Float64: TypeAlias = NDArray[np.float64]


class Outcome(NamedTuple):
    """What becomes of a block."""

    path: tuple[int, ...]
    """Accepted nodes, from the root downwards."""
    next_token: int
    """The target's own."""
    num_relaxed: int = 0
    """Of the accepted nodes, those that the exact rule would have rejected in their place."""
    samples: tuple[int, ...] = ()
    """What the target draws after the root and after each node, whatever stands; none under a rule that does not draw
    there."""


Decide: TypeAlias = Callable[[TokenTree, Float64, int, int, float], Outcome]
"""(block, log p, seed, number of committed tokens, lenience) -> outcome: the reference, one block at a time.

`log_p` is [1 + nodes, V], the root's row and then each node's; a row is the law of the token *after* its node. At
temperature 0 it is the law at temperature 1, whose likeliest token is the target's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to verify. Whoever asks how to treat a block asks these fields, and never which rule it is."""

    name: str
    needs_q: bool
    """Whether each guess has to tell what it was drawn from: so the draft draws, for one block at a time."""
    takes_trees: bool
    """Whether a node may have several children."""
    is_lossless: bool
    """Whether the output has the target's own law."""
    with_replacement: bool = False
    """Where a place has several draws: whether each is from the whole of q, so that two may be the same; else none is
    drawn twice."""
    takes_lenience: bool = False
    """Whether a request says how lenient it is."""
    decide: Decide
    at_zero: Rule | None = None
    """The rule that it is at temperature 0; None: itself."""

    def __repr__(self) -> str:
        return f"<Rule {self.name}>"

    def at(self, *, is_greedy: bool) -> Rule:
        """The rule that decides."""
        return self.at_zero if is_greedy and self.at_zero is not None else self


def draw(log_p: Float64, seed: int, position: int, row: int, purpose: Purpose) -> int:
    """A token with law p: argmax of log p + Gumbel noise; the lowest id of several. `log_p` need not be normalised."""
    gumbel = noise.gumbel(seed, position, row, purpose, len(log_p))
    return int((log_p.astype(np.float32) + gumbel).argmax())
