"""Trees of guesses below the last committed token.

Knows tokens, parents and q; must not know where guesses come from, how a tree grows or how it is verified. A verdict
(accepted path, next token) is a walk down such a tree. If the walk ends at a node, the tree below that node may be
verified next (`subtree`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import ge

import numpy as np

ROOT = -1
"""Parent of the first guesses of a block: the last committed token."""
NO_TOKEN = -1
"""No token was drawn."""


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A probability distribution over a few token ids. Ids that it does not list have probability zero."""

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]
    draws: tuple[int, ...] = ()
    """Tokens drawn from it after one node, in order, if there were several; else empty."""

    @classmethod
    def certain(cls, token: int) -> SparseDistribution:
        """The distribution with all its mass on `token`."""
        return cls((token,), (1.0,))

    @classmethod
    def of_counts(cls, counts: Mapping[int, int], most_tokens: int) -> SparseDistribution:
        """Shares of the `most_tokens` most frequent tokens, the first on ties. In float32, the type used on links."""
        kept = sorted(counts, key=counts.__getitem__, reverse=True)[:most_tokens]
        shares = np.array([counts[token] for token in kept], np.float32)
        return cls(tuple(kept), tuple((shares / shares.sum()).tolist()))

    @property
    def is_valid(self) -> bool:
        """Whether each token has a probability, none is negative, and they sum to 1."""
        is_whole = abs(sum(self.probs) - 1.0) < 1e-3  # allows for rounding; False for NaN
        return len(self.token_ids) == len(self.probs) and is_whole and min(self.probs) >= 0.0


NO_Q = SparseDistribution((), ())
"""Nothing was drawn."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Guesses after the last committed token. Invariant: `parents[i] < i`, so a parent precedes its children."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[SparseDistribution, ...] = ()
    """The distribution each token was sampled from; empty in coupled mode, which needs no q."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens) or (self.q and len(self.q) != len(self.tokens)):
            raise ValueError("a token tree needs one parent, and one q or none at all, for each token")
        if min(self.parents, default=ROOT) < ROOT or any(map(ge, self.parents, count())):
            raise ValueError("a token tree lists parents before their children")

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Sequence[SparseDistribution] = ()) -> TokenTree:
        """A tree of width one."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(q))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's children have depth 1."""
        return depths(self.parents)

    def child(self, parent: int, token: int) -> int | None:
        """The child of `parent` with this token, or None."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return None

    def prefix(self, num_nodes: int) -> TokenTree:
        """The first `num_nodes` nodes. They form a tree, because parents come first."""
        return TokenTree(self.tokens[:num_nodes], self.parents[:num_nodes], self.q[:num_nodes])


EMPTY_BLOCK = TokenTree()


def num_branches(parents: Sequence[int]) -> int:
    """Number of nodes that are not the first child of their parent; 0 for a chain."""
    return len(parents) - len(set(parents))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of each node; the root's children have depth 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return tuple(found)


def subtree(tree: TokenTree, top: int) -> tuple[TokenTree, tuple[int, ...]]:
    """The tree below node `top`, in the same order and with `top` as its root; and the indices of its nodes in
    `tree`."""
    kept: dict[int, int] = {top: ROOT}
    nodes: list[int] = []
    for node in range(top + 1, len(tree)):
        if tree.parents[node] in kept:
            kept[node] = len(nodes)
            nodes.append(node)
    tokens = tuple(tree.tokens[node] for node in nodes)
    parents = tuple(kept[tree.parents[node]] for node in nodes)
    q = tuple(tree.q[node] for node in nodes) if tree.q else ()
    return TokenTree(tokens, parents, q), tuple(nodes)
