"""The draft's half of a session's speculation tree: which nodes to feed next, and what to tell of what was found.

Knows tokens, chances and the order of work; must not know models, KV or time. The draft engine feeds a real model by
it and the simulator a law of agreement. Best first, as the dynamic trees of EAGLE-2 (Li et al. 2024, arXiv 2406.16858),
but without an end: a verdict makes another node the root, what lies below stays, and growing goes on from there.
Where the draft samples, what grows is a chain of its draws; whether it goes on below one depends on what that was drawn
from and never on what was drawn (docs/exactness.md, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from core.growth import Candidates
from core.speculation.chances import chances_of
from core.trees import NO_TOKEN, ROOT, Steady, Told

MIN_REACH = 4e-4
"""What is less likely is neither fed nor told."""
MAX_TOLD = 8
"""Candidates of one node that are told at most."""


@dataclass(eq=False, slots=True)
class Node:
    """A token that may come at its place."""

    token: int
    parent: Node | None
    rank: int
    chance: float
    """That it follows, if the text gets to its parent."""
    reach: float
    """That the text gets to it."""
    depth: int
    number: int = ROOT
    """As it was told; `ROOT` before."""
    said: Candidates | None = None
    """What the model says after it; None until it is fed."""
    children: list[Node] = field(default_factory=list)
    where: Any = None
    """Whoever feeds nodes may keep here what it knows of this one, whichever node is the root."""

    def path(self) -> list[int]:
        """Tokens from the root's child down to this node."""
        tokens: list[int] = []
        node: Node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def is_below(self, root: Node) -> bool:
        """Whether this is `root`, or grew below it."""
        node: Node | None = self
        while node is not None and node is not root:
            node = node.parent
        return node is root


class Grower:
    """The tree of one session as its draft knows it. The root is the last committed token."""

    def __init__(self) -> None:
        self._order = count()
        self.steady = Steady(1, 1)
        self._num_left = 0
        """Passes, of growth that ends by itself."""
        self.root = _new_root()
        self._open: list[tuple[float, int, Node]] = []
        self._untold: list[Node] = []
        self.num_told = 0

    def __repr__(self) -> str:
        return f"<Grower {self.num_told} nodes told, {len(self._open)} open>"

    def go_on(self, steady: Steady) -> None:
        """Grow so from now on; what there is already is rated anew when the tree gets its next root."""
        self.steady, self._num_left = steady, steady.num_passes

    def begin(self) -> None:
        """Forget the tree."""
        self.root = _new_root()
        self._untold.clear()
        self._open = [(-1.0, next(self._order), self.root)]

    def reroot(self, tokens: Sequence[int]) -> list[Node] | None:
        """Go down by `tokens`; the nodes on the way, or None where the tree does not know one: then it is forgotten."""
        path: list[Node] = []
        node = self.root
        for token in tokens:
            found = next((child for child in node.children if child.token == token), None)
            if found is None:
                self.begin()
                return None
            path.append(node := found)
        self.root = node
        node.parent = None
        self._untold = [each for each in self._untold if each.is_below(node) and each is not node]
        self._rate(node)
        return path

    def best(self) -> Node | None:
        """The likeliest node that is not fed."""
        while self._open and self._open[0][2].said is not None:
            heappop(self._open)
        return self._open[0][2] if self._open else None

    def pop(self) -> Node:
        """Take the likeliest out, in order to feed it."""
        return heappop(self._open)[2]

    def put_back(self, node: Node) -> None:
        """It was not fed after all."""
        self._push(node)

    # Growth that ends by itself

    def next_pass(self, num_rows: int) -> list[Node]:
        """The nodes to feed next, as many as there is room for; they are taken out. None where growth has ended."""
        nodes: list[Node] = []
        while len(nodes) < min(num_rows, self.steady.rows_per_pass) and self._num_left and self.best() is not None:
            nodes.append(self.pop())
        if sum(node.reach for node in nodes) >= self.steady.min_reach:
            return nodes
        for node in nodes:
            self.put_back(node)
        return []

    @property
    def has_ended(self) -> bool:
        """Whether no pass is worth making any more, or none is left."""
        nodes = self.next_pass(self.steady.rows_per_pass)
        for node in nodes:
            self.put_back(node)
        return not nodes

    def made_pass(self) -> None:
        """One of those that are left, the root's included."""
        self._num_left = max(0, self._num_left - 1)

    def take(self, nodes: Sequence[Node], said: Sequence[Candidates]) -> None:
        """What the model says after each of `nodes`, which may have been pruned meanwhile."""
        for node, each in zip(nodes, said, strict=True):
            node.said = each
        kept = [node for node in nodes if node.is_below(self.root)]
        for node, chances in zip(kept, self._chances(kept), strict=True):
            self._grow(node, chances)

    def tell(self) -> Told:
        """The nodes that nobody was told of, parents first."""
        nodes, self._untold = self._untold, []
        first = self.num_told
        for node in nodes:
            node.number, self.num_told = self.num_told, self.num_told + 1
        above = [(node.parent, node.parent.said) for node in nodes if node.parent is not None]
        drawn_from = [said.q for _, said in above if said is not None and said.sampled != NO_TOKEN]
        return Told(
            first,
            [parent.number for parent, _ in above],
            [node.token for node in nodes],
            [node.rank for node in nodes],
            [node.chance for node in nodes],
            [said.sureness(self.steady.measure) for _, said in above if said is not None],
            self.root.number,
            drawn_from,
        )

    def tell_anew(self) -> None:
        """Have all that there is told once more: who was told of it has lost some."""
        self.num_told, self.root.number = 0, ROOT
        self._untold, stack = [], [self.root]
        while stack:
            children = stack.pop().children
            self._untold += children
            stack += children

    def _rate(self, root: Node) -> None:
        root.reach, root.depth = 1.0, 0
        self._open.clear()
        fed = [node for node in _below(root) if node.said is not None]
        chances = dict(zip(map(id, fed), self._chances(fed), strict=True))
        stack = [root]
        while stack:
            node = stack.pop()
            if node.said is None:
                if node.depth < self.steady.max_depth:
                    self._open.append((-node.reach, next(self._order), node))
            else:
                self._grow(node, chances[id(node)], is_pushing=False)
                stack += node.children
        heapify(self._open)

    def _chances(self, fed: Sequence[Node]) -> list[list[float]]:
        said = [node.said for node in fed if node.said is not None]
        return chances_of(said, self.steady, min(self.steady.fanout, MAX_TOLD))

    def _grow(self, node: Node, chances: Sequence[float], *, is_pushing: bool = True) -> None:
        """Children for the candidates that are likely enough; those that are there get their chances anew."""
        assert node.said is not None, "only a node that was fed grows"
        is_sure = node.said.sureness(self.steady.measure) >= self.steady.min_sureness
        if node.depth >= self.steady.max_depth or not is_sure:
            return
        is_drawn = node.said.sampled != NO_TOKEN
        for rank, chance in enumerate(chances[:1] if is_drawn else chances):
            reach = node.reach * chance
            if rank < len(node.children):
                child = node.children[rank]
                child.chance, child.reach, child.depth = chance, reach, node.depth + 1
            elif reach >= MIN_REACH:
                child = self._add(node, rank, chance)
                if is_pushing:
                    self._push(child)
            else:
                break

    def _add(self, parent: Node, rank: int, chance: float) -> Node:
        assert parent.said is not None, "its candidates are known"
        said, reach = parent.said, parent.reach * chance
        token = said.ranked[rank] if said.sampled == NO_TOKEN else said.sampled
        child = Node(token, parent, rank, chance, reach, parent.depth + 1)
        parent.children.append(child)
        self._untold.append(child)
        return child

    def _push(self, node: Node) -> None:
        if node.depth < self.steady.max_depth:
            heappush(self._open, (-node.reach, next(self._order), node))


def _below(root: Node) -> Iterator[Node]:
    """It, and all that has grown from it."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def _new_root() -> Node:
    return Node(ROOT, None, 0, 1.0, 1.0, 0)


def likeliest(growers: Sequence[Grower], num_rows: int, min_reach: float = 0.0) -> Iterator[tuple[int, Node]]:
    """The nodes to feed next over several sessions, best first; they are taken out. Each with its grower's place."""
    heap = [(-node.reach, place) for place, grower in enumerate(growers) if (node := grower.best()) is not None]
    heapify(heap)
    for _ in range(num_rows):
        if not heap or -heap[0][0] < min_reach:
            return
        _, place = heappop(heap)
        yield place, growers[place].pop()
        if (following := growers[place].best()) is not None:
            heappush(heap, (-following.reach, place))
