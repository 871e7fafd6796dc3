"""How a draft grows a tree: which nodes to feed to the model next, and what becomes of its answers.

Knows tokens, ranks and the order of work; must not know models, KV or time. The draft engine feeds a real model by this
plan and the simulator a law of acceptance, so both take the same number of passes for the same tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.records import DraftRequest
from core.trees import NO_Q, NO_TOKEN, ROOT, Growth, Measure, SparseDistribution, TokenTree, depths

MIN_SHARE = 1e-6
"""Shares below it tell no more than this one does."""
MAX_RANKS = 32
"""Candidates kept of each node; a growth that asks for a higher rank gets nothing there."""


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
    """The draft's own draw from q, where verification needs one."""
    q: SparseDistribution = NO_Q
    shares: tuple[float, ...] = ()
    """Of each candidate, of what orders them, so that the first is `confidence`; none where it is not known."""

    @property
    def lead(self) -> float:
        """How clearly the first candidate wins: the mean of its log odds, against all others and against the second
        alone, as a chance. Where shares are known it foretells the target's token better than `confidence` does
        (docs/adr/0010).
        """
        if len(self.shares) < 2:
            return self.confidence
        first = min(max(self.confidence, MIN_SHARE), 1.0 - MIN_SHARE)
        odds = first / math.sqrt((1.0 - first) * max(self.shares[1], MIN_SHARE))
        return odds / (1.0 + odds)

    def sureness(self, measure: Measure) -> float:
        """How sure the draft is here."""
        match measure:
            case Measure.LEAD:
                return self.lead
            case Measure.CONFIDENCE:
                return min(max(self.confidence, 0.0), 1.0)
            case Measure.ENTROPY:
                return math.exp(-max(self.entropy, 0.0))


@dataclass(frozen=True, slots=True)
class Grown:
    """What became of a request, node by node, as `Drafted` has it."""

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    entropy: tuple[float, ...]
    q: tuple[SparseDistribution, ...] = ()


class Sprout:
    """One tree in the making. Nodes are numbered as in `Growth`: the block's first, then the growth's.

    Ask `frontier`, feed these nodes (each with its ancestors in sight), and `take` what the model says after each;
    until `is_done`. `known` are nodes, perhaps ROOT, whose KV and candidates are still there from an earlier request.
    """

    def __init__(self, request: DraftRequest, samples: bool, known: Mapping[int, Candidates]) -> None:
        assert isinstance(request.growth, Growth), "what grows steadily is core.speculation.grower's"
        self._request = request
        self._samples = samples
        block, growth = request.block, request.growth
        self._growth = growth
        self._parents = (*block.parents, *growth.parents)
        self._depths = depths(self._parents)
        self._num_block = len(block)
        self.tokens = [*block.tokens, *[NO_TOKEN] * len(growth)]
        self.q = [NO_Q] * len(growth)
        self.confidence = [0.0] * len(growth)
        self.entropy = [0.0] * len(growth)
        self.num_passes = 0
        self._children: dict[int, list[int]] = {}
        for node in range(len(block), len(self._parents)):
            self._children.setdefault(self._parents[node], []).append(node)
        self._taken: dict[int, set[int]] = {}
        for token, parent in zip(block.tokens, block.parents, strict=True):
            self._taken.setdefault(parent, set()).add(token)
        self._unfed = self._needed() - known.keys()
        self._ready = {node for node in self._unfed if node < self._num_block}
        for node in sorted(known):
            self._grow(node, known[node])

    def __repr__(self) -> str:
        return f"<Sprout {len(self.tokens)} nodes, {len(self._unfed)} to feed, {self.num_passes} passes>"

    @property
    def is_done(self) -> bool:
        return not self._ready

    def frontier(self) -> list[int]:
        """Nodes to feed in the next pass, parents first; ROOT stands for what is left of the suffix."""
        return sorted(self._ready)

    def take(self, found: Mapping[int, Candidates]) -> None:
        """What the model says after each node of the frontier, or of a first part of it."""
        self.num_passes += 1
        self._unfed -= found.keys()
        self._ready -= found.keys()
        for node, candidates in found.items():
            self._grow(node, candidates)

    def drop(self, nodes: Iterable[int]) -> None:
        """There is no room to feed these nodes, so that nothing grows below them."""
        dropped = set(nodes)
        for node in self.frontier():
            if node != ROOT and self._parents[node] in dropped:
                dropped.add(node)
        self._unfed -= dropped
        self._ready -= dropped

    def depth(self, node: int) -> int:
        """Distance from the root: the token after `node` stands that far behind the last committed one, and one."""
        return 0 if node == ROOT else self._depths[node]

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def place(self, node: int) -> int | None:
        """Place, in the block that it would belong to, of a sample drawn after `node`; None where none is drawn."""
        if not self._samples or not self._children.get(node):
            return None
        if not self._request.is_table:
            return self.depth(node)
        depth = 0
        while node >= self._num_block:
            depth, node = depth + 1, self._parents[node]
        return depth - 1 if depth else None

    def grown(self) -> Grown:
        """Each node of the growth: what it is, or `NO_TOKEN`."""
        q = tuple(self.q) if self._samples else ()
        return Grown(tuple(self.tokens[self._num_block :]), tuple(self.confidence), tuple(self.entropy), q)

    def _needed(self) -> set[int]:
        """Nodes below which something is to grow, and all that those must see."""
        needed: set[int] = set()
        for node in self._growth.parents:
            while node not in needed and node != ROOT:
                needed.add(node)
                node = self._parents[node]
        return needed | {ROOT} if len(self._growth) else needed

    def _grow(self, node: int, candidates: Candidates) -> None:
        children = self._children.get(node)
        if children is None:
            return
        is_sample = self.place(node) is not None
        taken = self._taken.get(node, ())
        free = candidates.ranked if not taken else [token for token in candidates.ranked if token not in taken]
        for child in children:
            rank = self._growth.ranks[child - self._num_block]
            if is_sample and rank == 0:
                self._fill(child, candidates.sampled, candidates, candidates.q)
            elif not is_sample and rank < len(free):
                self._fill(child, free[rank], candidates, NO_Q)

    def _fill(self, child: int, token: int, candidates: Candidates, q: SparseDistribution) -> None:
        if token == NO_TOKEN:
            return
        index = child - self._num_block
        self.tokens[child], self.q[index] = token, q
        self.confidence[index], self.entropy[index] = candidates.confidence, candidates.entropy
        if child in self._unfed:
            self._ready.add(child)


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

    def rebase(self, path: Sequence[int], block: TokenTree) -> tuple[list[int], dict[int, int]]:
        """Make the end of `path` the root and keep below it what `block` names, in place.

        Answers the nodes whose KV is kept, in order (`path`, then the block's), and for each node of the block that is
        held its new number.
        """
        top = path[-1] if path else ROOT
        found = self._find(block, top)
        kept = sorted(found.values())
        number = {top: ROOT} | {old: new for new, old in enumerate(kept)}
        old = [(self.parents[node], self.tokens[node], self.candidates[node]) for node in kept]
        root = self.candidates[top] if path else self.root
        self.clear()
        self.root = root
        for parent, token, candidates in old:
            self.add(number[parent], token, candidates)
        return [*path, *kept], {node: number[held] for node, held in found.items()}

    def below(self, path: Sequence[int]) -> TokenTree:
        """All that hangs below the end of `path`."""
        top = path[-1] if path else ROOT
        number, tokens, parents = {top: ROOT}, list[int](), list[int]()
        for node in range(top + 1, len(self.tokens)):
            if self.parents[node] in number:
                number[node] = len(tokens)
                tokens.append(self.tokens[node])
                parents.append(number[self.parents[node]])
        return TokenTree(tuple(tokens), tuple(parents))

    def clear(self) -> None:
        """Forget everything, the root's candidates too."""
        self.root = None
        self.tokens, self.parents, self.candidates, self._children = [], [], [], {}

    def _find(self, block: TokenTree, top: int) -> dict[int, int]:
        """Where the nodes of `block`, hung below `top`, are held: those whose ancestors are, too."""
        found: dict[int, int] = {ROOT: top}
        for node, (token, parent) in enumerate(zip(block.tokens, block.parents, strict=True)):
            held = self._children.get((found[parent], token)) if parent in found else None
            if held is not None:
                found[node] = held
        del found[ROOT]
        return found
