"""What is verified next, and what the target may go on with by itself.

Knows trees and shapes. Must not know engines, leases or states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.speculation import EMPTY_BLOCK, TokenTree, subtree
from orchestrator.policy import Shape

NO_SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class Guess:
    """A block, and its shape as a policy sees it."""

    block: TokenTree = EMPTY_BLOCK
    shape: Shape = NO_SHAPE
    sources: tuple[str, ...] = ()
    """Who has guessed each node."""

    def __len__(self) -> int:
        return len(self.block)


NO_GUESS = Guess()


@dataclass(frozen=True, slots=True)
class Offer:
    """A block that is verified and, below it, the next for each outcome that the target may go on with by itself."""

    tree: TokenTree
    num_block: int
    ranks: tuple[int, ...]
    """Of each node of the tree, as are the confidences and sources."""
    confidences: tuple[float, ...]
    sources: tuple[str, ...]
    is_open: bool
    """Whether the target may go on with an empty block at any other outcome."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no outcome that it answers."""
        return len(self.tree) == self.num_block and not self.is_open

    def follow(self, end: int, token: int) -> Guess | None:
        """The block with which the target goes on when the path to `end` is accepted and `token` follows."""
        node = self.tree.child(end, token)
        if node is None:
            return NO_GUESS if self.is_open else None
        block, nodes = subtree(self.tree, node)
        ranks, confidences = _at(self.ranks, nodes), _at(self.confidences, nodes)
        return Guess(block, Shape(block.parents, ranks, confidences), _at(self.sources, nodes))


def _at(values: Sequence, indices: Iterable[int]) -> tuple:  # type: ignore[type-arg]
    return tuple(values[index] for index in indices) if values else ()
