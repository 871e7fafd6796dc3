"""What a draft model has said, and of which tokens: the nodes whose KV a draft engine holds.

Must not know models, KV or time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.speculation.growth import Measure
from core.speculation.token_tree import NO_Q, NO_TOKEN, ROOT, SparseDistribution

MIN_SHARE = 1e-6
"""Shares below it tell no more than this one does."""
MAX_RANKS = 32
"""Candidates kept of each node."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the draft says about the token after one node."""

    ranked: tuple[int, ...]
    """Token ids, likeliest first: by q with the shared noise in coupled mode, by q alone otherwise."""
    confidence: float = 1.0
    """How sure the draft is of the first: its share of what orders them, the shared noise included in coupled mode."""
    entropy: float = 0.0
    """Of q, in nats."""
    sampled: int = NO_TOKEN
    """The draft's own draw from q, where verification needs one; the first of several, which q tells of."""
    q: SparseDistribution = NO_Q
    shares: tuple[float, ...] = ()
    """Of each candidate, of what orders them, so that the first is `confidence`; none where it is not known."""

    @property
    def guesses(self) -> tuple[int, ...]:
        """What may become nodes: where verification needs draws nothing but these, in the order of drawing."""
        if self.sampled == NO_TOKEN:
            return self.ranked
        return tuple(dict.fromkeys(self.q.draws)) or (self.sampled,)

    @property
    def margin(self) -> float:
        """How clearly the first candidate wins: the mean of its log odds, against all others and against the second
        alone, as a chance. Where shares are known it foretells the target's token better than `confidence` does
        (docs/adr/rules).
        """
        if len(self.shares) < 2:
            return self.confidence
        first = min(max(self.confidence, MIN_SHARE), 1.0 - MIN_SHARE)
        odds = first / math.sqrt((1.0 - first) * max(self.shares[1], MIN_SHARE))
        return odds / (1.0 + odds)

    def confidence_by(self, measure: Measure) -> float:
        """How sure the draft is here."""
        match measure:
            case Measure.MARGIN:
                return self.margin
            case Measure.CONFIDENCE:
                return min(max(self.confidence, 0.0), 1.0)
            case Measure.ENTROPY:
                return math.exp(-max(self.entropy, 0.0))


@dataclass(slots=True)
class HeldTree:
    """Nodes below the committed tokens that have been fed, in the order of feeding (which is that of their KV).

    Invariant: parents precede their children, and no two children of a node have the same token.
    """

    root: Candidates | None = None
    """What was said after the last committed token; None when that is not known any more."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, candidates: Candidates) -> int:
        """A node that has just been fed."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.candidates.append(candidates)
        self._children[parent, token] = node
        return node

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that hold `tokens` from the root down, as far as there are any."""
        path: list[int] = []
        for token in tokens:
            child = self._children.get((path[-1] if path else ROOT, token))
            if child is None:
                break
            path.append(child)
        return path

    def rebase(self, path: Sequence[int], *, keeps_below: bool) -> list[int]:
        """Make the end of `path` the root, in place, with all that hangs below it or with nothing.

        Answers the nodes whose KV is kept, in order: `path`, then those below it.
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
        """Forget everything, the root's candidates too."""
        self.root = None
        self.tokens, self.parents, self.candidates, self._children = [], [], [], {}

    def _below(self, top: int) -> list[int]:
        below, nodes = {top}, list[int]()
        for node in range(top + 1, len(self.tokens)):
            if self.parents[node] in below:
                below.add(node)
                nodes.append(node)
        return nodes
