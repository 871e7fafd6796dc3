"""Blocks to verify, and offers for the target to continue with by itself.

Knows trees and shapes. Must not know engines, leases or states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.speculation import EMPTY_BLOCK, ROOT, UNRANKED, TokenTree, subtree
from orchestrator.policy import Shape

NO_SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class Questions:
    """Rows of the target's output that a guesser requests, within a block."""

    source: str
    rows: tuple[int, ...]
    """Indices into the target's samples: first that of the root, then one for each node that the guesser asks about."""
    num_added: int
    """Number of nodes at the end of the block that are only asked about, not guessed."""


@dataclass(frozen=True, slots=True)
class SourcedBlock:
    """A block of guesses with their sources, and its shape as a policy sees it."""

    tree: TokenTree = EMPTY_BLOCK
    shape: Shape = NO_SHAPE
    sources: tuple[str, ...] = ()
    """Source of each node."""
    questions: Questions | None = None

    def __len__(self) -> int:
        return len(self.tree)

    def asking(self, source: str, tree: TokenTree) -> SourcedBlock:
        """Return this block with the missing nodes of `tree` appended."""
        tokens, parents, num_guesses = list(self.tree.tokens), list(self.tree.parents), len(self.tree)
        index_of = {key: index for index, key in enumerate(zip(parents, tokens, strict=True))}
        indices = list[int]()
        for token, above in zip(tree.tokens, tree.parents, strict=True):
            parent = ROOT if above == ROOT else indices[above]
            index = index_of.setdefault((parent, token), len(tokens))
            if index == len(tokens):
                tokens.append(token)
                parents.append(parent)
            indices.append(index)
        num = len(tokens) - num_guesses
        shape = Shape(tuple(parents), (*self.shape.ranks, *[UNRANKED] * num), (*self.shape.confidence, *[0.0] * num))
        questions = Questions(source, (0, *[index + 1 for index in indices]), num)
        return SourcedBlock(TokenTree(tuple(tokens), shape.parents), shape, (*self.sources, *[source] * num), questions)

    def below(self, node: int) -> SourcedBlock:
        """Return the subtree below a node, with that node as the root."""
        tree, nodes = subtree(self.tree, node)
        ranks, confidences = _at(self.shape.ranks, nodes), _at(self.shape.confidence, nodes)
        return SourcedBlock(tree, Shape(tree.parents, ranks, confidences), _at(self.sources, nodes))

    def credits(self, path: Sequence[int]) -> tuple[list[str], list[str]]:
        """Return the source of each node that counts as a guess, and of each node on the accepted `path`.

        Nodes that were only asked about count only if they are on the path.
        """
        accepted = [self.sources[node] for node in path]
        if self.questions is None:
            return list(self.sources), accepted
        num_guesses = len(self.tree) - self.questions.num_added
        lucky = [self.sources[node] for node in path if node >= num_guesses]
        return [*self.sources[:num_guesses], *lucky], accepted


NO_BLOCK = SourcedBlock()


@dataclass(frozen=True, slots=True)
class Offer:
    """A block being verified and, below it, the next block for each outcome that the offer covers."""

    whole: SourcedBlock
    num_block: int
    is_open: bool
    """Whether the target may continue with an empty block after any other outcome."""

    @property
    def is_empty(self) -> bool:
        """Whether the offer covers no outcome."""
        return len(self.whole) == self.num_block and not self.is_open

    @property
    def is_plain(self) -> bool:
        """Whether the offer is a step without guesses, whatever the verdict."""
        return self.is_open and not len(self.whole)

    def follow(self, end: int, token: int) -> SourcedBlock | None:
        """Return the next block if the path to `end` is accepted and `token` follows."""
        node = self.whole.tree.child(end, token)
        if node is None:
            return NO_BLOCK if self.is_open else None
        return self.whole.below(node)


def _at(values: Sequence, indices: Iterable[int]) -> tuple:  # type: ignore[type-arg]
    return tuple(values[index] for index in indices) if values else ()
