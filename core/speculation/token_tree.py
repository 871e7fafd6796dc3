"""Trees of guesses below the last committed token.

Knows tokens, parents and q; must not know who guessed, how a tree grows or who verifies. A verdict (accepted path, next
token) is a walk down such a tree, and where the walk ends inside it, what lies below may be verified next (`subtree`).
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
"""Where none was drawn."""


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A probability distribution over few token ids; the ids it does not list have probability zero."""

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]
    draws: tuple[int, ...] = ()
    """What was drawn from it at one place, in this order, where several tokens were; else the node's own alone."""

    @classmethod
    def certain(cls, token: int) -> SparseDistribution:
        """This token and no other."""
        return cls((token,), (1.0,))

    @classmethod
    def of_counts(cls, counts: Mapping[int, int], most_tokens: int) -> SparseDistribution:
        """The shares of the `most_tokens` most frequent, in float32, which is how they travel: of equals the first."""
        kept = sorted(counts, key=counts.__getitem__, reverse=True)[:most_tokens]
        shares = np.array([counts[token] for token in kept], np.float32)
        return cls(tuple(kept), tuple((shares / shares.sum()).tolist()))

    @property
    def is_law(self) -> bool:
        """Whether each token has a probability, and one of them comes."""
        is_whole = abs(sum(self.probs) - 1.0) < 1e-3  # they may have been rounded; a NaN is not whole
        return len(self.token_ids) == len(self.probs) and is_whole and min(self.probs) >= 0.0


NO_Q = SparseDistribution((), ())
"""Where nothing was drawn."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Guesses after the last committed token. Invariant: `parents[i] < i`, so a parent precedes its children."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[SparseDistribution, ...] = ()
    """What the draft sampled each token from; empty in coupled mode, which needs no q."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens) or (self.q and len(self.q) != len(self.tokens)):
            raise ValueError("a token tree needs one parent, and one q or none at all, for each token")
        if min(self.parents, default=ROOT) < ROOT or any(map(ge, self.parents, count())):
            raise ValueError("a token tree lists parents before their children")

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Sequence[SparseDistribution] = ()) -> TokenTree:
        """The tree of width one over `tokens`."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(q))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; the first guesses have depth 1."""
        return depths(self.parents)

    def child(self, parent: int, token: int) -> int | None:
        """The node below `parent` that guesses `token`, if there is one."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return None

    def prefix(self, num_nodes: int) -> TokenTree:
        """The first `num_nodes` nodes; they are a tree, because parents come first."""
        return TokenTree(self.tokens[:num_nodes], self.parents[:num_nodes], self.q[:num_nodes])


EMPTY_BLOCK = TokenTree()


def num_branches(parents: Sequence[int]) -> int:
    """Branches of a tree beside its first: none in a chain, one more for each guess beside another."""
    return len(parents) - len(set(parents))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Distance of each node from the root, whose children have depth 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return tuple(found)


def subtree(tree: TokenTree, top: int) -> tuple[TokenTree, tuple[int, ...]]:
    """What hangs below node `top`, in the same order, with `top` as its root; and which nodes of `tree` those are."""
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
