"""Candidates of a draft model, and the tree of nodes whose KV a draft engine holds.

Must not know models, KV or time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from core.speculation.growth import Measure
from core.speculation.token_tree import NO_Q, NO_TOKEN, ROOT, SparseDistribution, TokenTree

MIN_SHARE = 1e-6
"""Shares are clipped to at least this."""
MAX_RANKS = 32
"""Number of candidates kept per node."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The draft's prediction of the token after one node."""

    ranked: tuple[int, ...]
    """Token ids, likeliest first: by q with the shared noise in coupled mode, by q alone otherwise."""
    confidence: float = 1.0
    """Share of the first candidate, by q with the shared noise in coupled mode, by q alone otherwise."""
    entropy: float = 0.0
    """Entropy of q, in nats."""
    sampled: int = NO_TOKEN
    """The draft's draw from q, if the rule needs q; the first of several, which `q.draws` lists."""
    q: SparseDistribution = NO_Q
    shares: tuple[float, ...] = ()
    """Share of each candidate, by the scores that order them; the first equals `confidence`. Empty if unknown."""

    @property
    def guesses(self) -> tuple[int, ...]:
        """Tokens that may become nodes. If the rule needs q: only the draws, in the order of drawing."""
        if self.sampled == NO_TOKEN:
            return self.ranked
        return tuple(dict.fromkeys(self.q.draws)) or (self.sampled,)

    @property
    def margin(self) -> float:
        """How clearly the first candidate wins: the mean of its log odds against all others and against the second
        alone.

        Returned as a probability. If shares are known it predicts the target's token better than `confidence` does
        (docs/adr/rules).
        """
        if len(self.shares) < 2:
            return self.confidence
        first = min(max(self.confidence, MIN_SHARE), 1.0 - MIN_SHARE)
        odds = first / math.sqrt((1.0 - first) * max(self.shares[1], MIN_SHARE))
        return odds / (1.0 + odds)

    def confidence_by(self, measure: Measure) -> float:
        """Confidence of the draft at this node by `measure`, in [0, 1]."""
        match measure:
            case Measure.MARGIN:
                return self.margin
            case Measure.CONFIDENCE:
                return min(max(self.confidence, 0.0), 1.0)
            case Measure.ENTROPY:
                return math.exp(-max(self.entropy, 0.0))


Found = TypeVar("Found")


@dataclass(slots=True)
class HeldTree(Generic[Found]):
    """Nodes below the committed tokens that have been fed, in the order of feeding, which is the order of their KV.

    Each has what was found after it: a draft's candidates, or a target's likeliest tokens for a beam search.
    Invariant: parents precede their children, and no two children of a node have the same token.
    """

    root: Found | None = None
    """Candidates after the last committed token; None if unknown."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    candidates: list[Found] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, candidates: Found) -> int:
        """Add a node that has just been fed. Return its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.candidates.append(candidates)
        self._children[parent, token] = node
        return node

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Nodes that hold `tokens` from the root down, up to the first token that has none."""
        path: list[int] = []
        for token in tokens:
            child = self._children.get((path[-1] if path else ROOT, token))
            if child is None:
                break
            path.append(child)
        return path

    def find(self, tree: TokenTree) -> list[int | None]:
        """The node that is each node of `tree`; None for one that is not held."""
        found: list[int | None] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            above = ROOT if parent == ROOT else found[parent]
            found.append(None if above is None else self._children.get((above, token)))
        return found

    def keep(self, nodes: Sequence[int]) -> None:
        """Drop all nodes but these, which are in order and have no parent outside of them."""
        root, old = self.root, [(self.parents[node], self.tokens[node], self.candidates[node]) for node in nodes]
        number = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        self.clear()
        self.root = root
        for parent, token, candidates in old:
            self.add(number[parent], token, candidates)

    def rebase(self, path: Sequence[int], *, keeps_below: bool) -> list[int]:
        """Make the end of `path` the root, in place. Nodes below it stay if `keeps_below`; all others are dropped.

        Return the nodes whose KV is kept, in order: `path`, then those below it.
        """
        if not self.tokens:
            return []
        top = path[-1] if path else ROOT
        kept = self._below(top) if keeps_below else []
        number = {top: ROOT} | {old: new for new, old in enumerate(kept)}
        old = [(self.parents[node], self.tokens[node], self.candidates[node]) for node in kept]
        root = self.candidates[top] if path else self.root
        self.clear()
        self.root = root
        for parent, token, candidates in old:
            self.add(number[parent], token, candidates)
        return [*path, *kept]

    def clear(self) -> None:
        """Drop all nodes and the root's candidates."""
        self.root = None
        self.tokens, self.parents, self.candidates, self._children = [], [], [], {}

    def _below(self, top: int) -> list[int]:
        below, nodes = {top}, list[int]()
        for node in range(top + 1, len(self.tokens)):
            if self.parents[node] in below:
                below.add(node)
                nodes.append(node)
        return nodes
