"""What a draft's answer is worth to a session: the block to verify next, or the table that holds it.

Knows trees and shapes; a corrupt answer ends here. Must not know engines, leases or states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.records import Drafted, DraftRequest
from core.trees import (
    EMPTY_BLOCK,
    NO_TOKEN,
    Growth,
    SparseDistribution,
    TokenTree,
    grown,
    subtree,
)
from orchestrator.pilot import Shape, Source

NO_SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class Guess:
    """A block, and its shape as a pilot sees it."""

    block: TokenTree = EMPTY_BLOCK
    shape: Shape = NO_SHAPE

    def __len__(self) -> int:
        return len(self.block)

    def prefix(self, num_nodes: int) -> Guess:
        """The first `num_nodes` nodes."""
        return self if num_nodes >= len(self) else Guess(self.block.prefix(num_nodes), self.shape.prefix(num_nodes))


NO_GUESS = Guess()


def looked_up(tokens: Sequence[int]) -> Guess:
    """A chain that was looked up in the text: sure of each token, so its q is a point mass."""
    block = TokenTree.chain(tokens, [SparseDistribution((token,), (1.0,)) for token in tokens])
    zeros = (0.0,) * len(block)
    return Guess(block, Shape(block.parents, (0,) * len(block), (1.0,) * len(block), zeros, Source.LOOKUP))


@dataclass(frozen=True, slots=True)
class Followed:
    """Where a verdict ends in a table."""

    guess: Guess
    """What lies below; `NO_GUESS` on a miss."""
    rank: int | None
    num_listed: int
    """Outcomes listed where the accepted path ended; `rank` of them come before the verdict's token, if it is there."""


NOWHERE = Followed(NO_GUESS, None, 0)


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """A block and, below it, the next block for each likely outcome of its verification. Source: DESIGN, section 5."""

    num_block: int
    tree: TokenTree
    shape: Shape
    """Of the whole tree; what it says of the block's own nodes is not used."""

    def __len__(self) -> int:
        """Nodes prepared."""
        return len(self.tree) - self.num_block

    def follow(self, end: int, token: int) -> Followed:
        """Where accepting the path to `end`, then `token`, leads.

        Outcomes alone count: a target that says what the block itself guessed there would have accepted that guess.
        """
        outcomes = [n for n in range(self.num_block, len(self.tree)) if self.tree.parents[n] == end]
        outcomes.sort(key=lambda node: self.shape.ranks[node])
        for rank, node in enumerate(outcomes):
            if self.tree.tokens[node] == token:
                block, nodes = subtree(self.tree, node)
                return Followed(Guess(block, _select(self.shape, nodes, block.parents)), rank, len(outcomes))
        return Followed(NO_GUESS, None, len(outcomes))


def read_block(request: DraftRequest, drafted: Drafted, vocab_size: int) -> Guess:
    """The block that was asked for. Raises: ValueError when the answer is corrupt."""
    table = read_table(request, drafted, vocab_size)
    return Guess(table.tree, table.shape)


def read_table(request: DraftRequest, drafted: Drafted, vocab_size: int) -> OutcomeTable:
    """The table that was asked for. Raises: ValueError when the answer is corrupt."""
    block, growth = request.block, request.growth
    assert isinstance(growth, Growth), "what grows steadily is told of as it grows"
    _check(len(growth), drafted, vocab_size)
    tree, kept = grown(block, growth, drafted.tokens, drafted.q)
    zeros = (0.0,) * len(block)
    shape = Shape(
        tree.parents,
        (*[0] * len(block), *_at(growth.ranks, kept)),
        (*zeros, *(_at(drafted.confidence, kept) or (1.0,) * len(kept))),
        (*zeros, *(_at(drafted.entropy, kept) or (0.0,) * len(kept))),
    )
    return OutcomeTable(len(block), tree, shape)


def _check(num: int, drafted: Drafted, vocab_size: int) -> None:
    is_whole = len(drafted.tokens) == num and len(drafted.confidence) in (0, num) and len(drafted.entropy) in (0, num)
    if not is_whole or len(drafted.q) != num:
        raise ValueError("a draft answered for other nodes than it was asked for")
    if any(type(token) is not int or (token != NO_TOKEN and not 0 <= token < vocab_size) for token in drafted.tokens):
        raise ValueError("a draft guessed a token outside the vocabulary")
    if not all(map(_is_law, drafted.q)):
        raise ValueError("a draft's q is no law")
    if not all(0 <= x <= 1 + 1e-6 for x in drafted.confidence):
        raise ValueError("a draft's confidence is no probability")
    if not all(x >= 0 and math.isfinite(x) for x in drafted.entropy):
        raise ValueError("a draft's entropy is no entropy")


def _is_law(q: SparseDistribution) -> bool:
    return len(q.token_ids) == len(q.probs) and all(0 <= prob <= 1 + 1e-6 for prob in q.probs)


def _at(values: Sequence, indices: Iterable[int]) -> tuple:  # type: ignore[type-arg]
    return tuple(values[index] for index in indices) if values else ()


def _select(shape: Shape, nodes: Sequence[int], parents: tuple[int, ...]) -> Shape:
    ranks, confidence, entropy = (_at(values, nodes) for values in (shape.ranks, shape.confidence, shape.entropy))
    return Shape(parents, ranks, confidence, entropy, shape.source)
