"""Toy models for `core.reference`, and blocks as it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from core.reference import Text, Tree
from core.speculation.token_tree import ROOT, TokenTree


@dataclass(frozen=True)
class Toy:
    """Random log probabilities after each text, not normalised; a draft's are `unlikeness` away from the target's."""

    key: int
    vocab_size: int
    unlikeness: float = 0.0

    def __call__(self, text: Text) -> NDArray[np.float32]:
        random = np.random.default_rng([self.key, *text])
        own, other = random.normal(scale=1.5, size=(2, self.vocab_size))
        return (own + self.unlikeness * other).astype(np.float32)

    def unlike(self, unlikeness: float) -> Toy:
        return replace(self, unlikeness=unlikeness)


def tree_of(block: TokenTree) -> Tree:
    """The same block as a tree of the reference; of equal siblings only the first counts."""
    trees: list[Tree] = [{}]
    for token, parent in zip(block.tokens, block.parents, strict=True):
        trees.append({})
        trees[parent + 1].setdefault(token, trees[-1])
    return trees[0]


def nodes_of(block: TokenTree, tokens: Sequence[int]) -> tuple[int, ...]:
    """The nodes on the path with these tokens."""
    path: list[int] = []
    for token in tokens:
        node = block.child(path[-1] if path else ROOT, token)
        assert node is not None
        path.append(node)
    return tuple(path)
