"""The interface of a verification rule: which guesses of a block are accepted, and which token follows them.

Knows blocks, log p and the noise; must not know sessions, models or the source of a guess. Proofs: docs/exactness.md.
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
    """The verdict on a block."""

    path: tuple[int, ...]
    """Accepted nodes, from the root downwards."""
    next_token: int
    """The target's own token: a correction or the bonus token."""
    num_relaxed: int = 0
    """Number of accepted nodes that the exact rule would have rejected."""
    samples: tuple[int, ...] = ()
    """The target's token after the root and after each node, accepted or not; empty under rules that do not sample
    every row."""


Decide: TypeAlias = Callable[[TokenTree, Float64, int, int, float], Outcome]
"""(block, log p, seed, number of committed tokens, lenience) -> outcome: the reference, one block at a time.

`log_p` is [1 + nodes, V]: the root's row, then each node's. A row is the distribution of the token *after* its node. At
temperature 0 it is the distribution at temperature 1, and the target's token is its argmax.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A way to verify blocks. Code outside `rules/` checks these fields, never the rule's name."""

    name: str
    needs_q: bool
    """Whether each guess must carry the q it was drawn from. If so, the draft samples, for one block at a time."""
    takes_trees: bool
    """Whether a node may have several children."""
    is_lossless: bool
    """Whether the output follows the target's own distribution."""
    with_replacement: bool = False
    """Whether several draws at one place are independent, so that a token may be drawn twice; else draws are without
    replacement."""
    takes_lenience: bool = False
    """Whether a request may set a lenience."""
    decide: Decide
    at_zero: Rule | None = None
    """The rule used at temperature 0; None if this one is."""

    def __repr__(self) -> str:
        return f"<Rule {self.name}>"

    def at(self, *, is_greedy: bool) -> Rule:
        """The rule to apply: `at_zero` if greedy and there is one, else this one."""
        return self.at_zero if is_greedy and self.at_zero is not None else self


def draw(log_p: Float64, seed: int, position: int, row: int, purpose: Purpose) -> int:
    """Sample a token from p: argmax of log p + Gumbel noise, the lowest id on ties. `log_p` need not be normalised."""
    gumbel = noise.gumbel(seed, position, row, purpose, len(log_p))
    return int((log_p.astype(np.float32) + gumbel).argmax())
