"""The orchestrator's half of a session's speculation tree: what may come after the last committed token.

The draft tells of nodes pass by pass, guessers (`guesses`) propose some for the next block, blocks are taken out of it,
and a verdict makes another node the root. Nodes are objects, and committed tokens are nodes, too: so what a draft tells
hangs below its parent wherever the root is by then, and a verdict moves the root and little else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, islice, repeat

import numpy as np

from core.speculation.guesses import Guesses
from core.trees import NO_Q, ROOT, UNRANKED, Floats, Ints, SparseDistribution, TokenTree, Told

MAX_NUMBERS = 1 << 30
"""That a draft may use until it is asked to tell all anew, from 0: a message has room for twice as many."""
MAX_TRAIL = 512
"""Committed tokens that are remembered: what a draft tells hangs below one of the last few of them."""
SPARE_NUMBERS = 256
"""Numbers of nodes that no verdict can lead to any more, until those are looked for."""


class Node:
    """A token that may follow its parent, or has followed it."""

    __slots__ = ("__weakref__", "chance", "children", "guessed", "is_passed", "lead", "parent", "q", "rank", "token")

    def __init__(self, token: int, parent: Node | None) -> None:
        self.token = token
        self.parent = parent
        self.children: dict[int, Node] = {}
        """By token, in the order in which they came."""
        self.rank = UNRANKED
        """Among the draft's candidates; `UNRANKED` while the draft has not told of the node: then it is local."""
        self.lead = 0.0
        """How sure the draft was at the parent."""
        self.chance = 0.0
        """By the draft, that the text goes on with the node, if it gets to its parent; 0 for local nodes."""
        self.guessed = 0.0
        """The same by the guessers, for this root; 0 where none guesses the node."""
        self.q: SparseDistribution = NO_Q
        """What it was drawn from, where the draft samples."""
        self.is_passed = False
        """Whether another token has been committed behind it."""

    def __repr__(self) -> str:
        return f"<Node {self.token}, {len(self.children)} children>"

    @property
    def is_drafted(self) -> bool:
        return self.rank != UNRANKED

    @property
    def likely(self) -> float:
        """That the text goes on with it, if it gets to its parent."""
        return max(self.chance, self.guessed)

    def child(self, token: int) -> Node:
        """The one that is `token`, which may have to be made."""
        found = self.children.get(token)
        if found is None:
            found = self.children[token] = Node(token, self)
        return found

    def drafted_children(self) -> list[Node]:
        """In the order of their ranks."""
        return sorted((node for node in self.children.values() if node.is_drafted), key=lambda node: node.rank)


class Part:
    """Nodes of a tree, parents first, as a pilot sees them: it must not know tokens."""

    __slots__ = ("_nodes", "reach")

    def __init__(self, nodes: Sequence[Node] = (), reach: Sequence[float] = ()) -> None:
        self._nodes = tuple(nodes)
        self.reach: Floats = np.array(reach, np.float64)
        """Chance that the text gets to each node. Not above its parent's."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"<Part of {len(self)} nodes>"

    @property
    def leads(self) -> tuple[float, ...]:
        """How sure the draft was at the parent of each."""
        return tuple(node.lead for node in self._nodes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of each among the draft's candidates, or `UNRANKED`."""
        return tuple(node.rank for node in self._nodes)

    @property
    def parents(self) -> tuple[int, ...]:
        """Which of the nodes is the parent of each; `ROOT` where none is."""
        place = {id(node): index for index, node in enumerate(self._nodes)}
        return tuple(place.get(id(node.parent), ROOT) for node in self._nodes)

    @property
    def depth(self) -> int:
        """Nodes in a row, at most."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def head(self, num_nodes: int) -> Part:
        """The first of them."""
        return Part(self._nodes[:num_nodes], self.reach[:num_nodes].tolist())

    def take(self, places: Sequence[int]) -> Part:
        """Those at these places."""
        return Part([self._nodes[place] for place in places], self.reach[list(places)].tolist())

    def drafted(self) -> Part:
        """Those that the draft has told of."""
        return self.take([place for place, node in enumerate(self._nodes) if node.is_drafted])

    def straight(self) -> Part:
        """The chain from the root on that always takes the first."""
        places, end = list[int](), ROOT
        for place, parent in enumerate(self.parents):
            if parent == end:
                places.append(end := place)
        return self.take(places)

    def branches(self) -> Ints:
        """How many branches, beside the first, each of these and those before it have: a parent's later children."""
        first: dict[int, int] = {}
        is_later = [first.setdefault(parent, place) != place for place, parent in enumerate(self.parents)]
        return np.cumsum(is_later, dtype=np.int64)

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """All of theirs, in this order."""
        return cls([node for part in parts for node in part._nodes], [each for part in parts for each in part.reach])


EMPTY_PART = Part()


class SpeculationTree:
    """Nodes below the last committed token, the root. Invariant: siblings differ."""

    def __init__(self, *, is_drawn: bool = False) -> None:
        """`is_drawn`: whether blocks tell what each guess was drawn from, as rejection and block verification ask."""
        self._is_drawn = is_drawn
        self.num_told = 0
        """Numbers that the draft has used: its next message begins there, or one was lost."""
        self.has_lost_some = False
        """Whether the draft knows nodes below the root of which it has told, and which are not here."""
        self._root = Node(ROOT, None)
        self._trail = deque([self._root])
        """The last committed tokens, the root at the end."""
        self._numbered: dict[int, Node] = {}
        """By the draft's numbers. Some of those that no verdict can lead to any more are among them."""
        self._most_numbers = SPARE_NUMBERS
        self._touched: list[Node] = []
        """By guessers, for this root."""

    def __repr__(self) -> str:
        return f"<SpeculationTree {len(self)} nodes, {self.num_told} told>"

    def __len__(self) -> int:
        return sum(1 for _ in self._below())

    def _below(self) -> Iterator[Node]:
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    @property
    def has_drafted(self) -> bool:
        """Whether the draft has told of anything that may follow."""
        return any(node.is_drafted for node in self._root.children.values())

    # Growing

    def add(self, told: Told, num_unknown: int = 0) -> None:
        """What a draft tells that does not know of the last `num_unknown` committed tokens.

        A local node becomes the draft's. What was told before is dropped. Raises: ValueError when nodes were left out.
        """
        if told.first + len(told) <= self.num_told and len(told):
            return
        if told.first != self.num_told:
            raise ValueError(f"a draft goes on at node {told.first} where {self.num_told} have been told")
        if num_unknown == 0 and told.root != ROOT and self._numbered.get(told.root) is not self._root:
            self.has_lost_some = True
        self._hang(told, self._trail[-1 - num_unknown] if num_unknown < len(self._trail) else None)
        self.num_told += len(told)
        if len(self._numbered) > self._most_numbers:
            self._forget_numbers()

    def _hang(self, told: Told, root: Node | None) -> None:
        """`root` is what the draft calls so; None where that is too long ago."""
        numbered = self._numbered
        columns = (getattr(told, name).tolist() for name in ("parents", "tokens", "ranks", "chances", "leads"))
        laws = told.q or repeat(NO_Q)
        for number, parent, token, rank, chance, lead, q in zip(count(told.first), *columns, laws, strict=False):
            above = root if parent == ROOT else numbered.get(parent)
            if above is None or (above.is_passed and token not in above.children):
                continue  # no verdict can lead there any more
            numbered[number] = node = above.child(token)
            if node.rank == UNRANKED:  # of two alike the first counts
                node.rank, node.chance, node.lead, node.q = rank, chance, lead, q

    def _forget_numbers(self) -> None:
        """Of nodes that no verdict can lead to any more; their ties are cut, so that they are freed at once."""
        kept = set(map(id, chain(self._below(), self._trail)))
        gone = [number for number, node in self._numbered.items() if id(node) not in kept]
        for node in map(self._numbered.pop, gone):
            node.parent, node.children = None, {}
        self._most_numbers = len(self._numbered) + SPARE_NUMBERS

    def guess(self, guesses: Guesses) -> None:
        """What a guesser proposes, until the next verdict. What is there already is the same node, whosever it is."""
        nodes: list[Node] = []
        for parent, token, chance in zip(guesses.parents, guesses.tokens, guesses.chances, strict=True):
            node = (self._root if parent == ROOT else nodes[parent]).child(token)
            node.guessed = max(node.guessed, chance)
            nodes.append(node)
        self._touched += nodes

    # Taking

    def _likeliest(self, max_depth: int) -> Iterator[tuple[float, Node]]:
        """Chance that the text gets there, and where: falling. Each comes after its parent."""
        order, heap = count(), list[tuple[float, int, int, Node]]()
        reach, depth, node = 1.0, 0, self._root
        while True:
            if depth < max_depth:
                for child in node.children.values():
                    heappush(heap, (-reach * max(child.chance, child.guessed), next(order), depth + 1, child))
            if not heap:
                return
            reach, _, depth, node = heappop(heap)
            reach = -reach
            yield reach, node

    def best(self, num_nodes: int, max_depth: int) -> Part:
        """The likeliest nodes, likeliest first: each comes after its parent, which is likelier."""
        found = list(islice(self._likeliest(max_depth), max(num_nodes, 0)))
        return Part([node for _, node in found], [reach for reach, _ in found])

    def first_chain(self, max_depth: int) -> Part:
        """The draft's first candidate of the root, its first candidate of that, and so on: as far as it has told."""
        nodes, reach = list[Node](), [1.0]
        while len(nodes) < max_depth:
            above = nodes[-1] if nodes else self._root
            node = next((child for child in above.children.values() if child.rank == 0), None)
            if node is None:
                break
            nodes.append(node)
            reach.append(reach[-1] * node.likely)
        return Part(nodes, reach[1:])

    def block(self, part: Part) -> TokenTree:
        """These nodes, whose parents are among them and come first."""
        laws = tuple(_law(node) for node in part._nodes) if self._is_drawn else ()
        return TokenTree(tuple(node.token for node in part._nodes), part.parents, laws)

    def part_of(self, block: TokenTree) -> Part | None:
        """Where the nodes of this block are; None unless all are here."""
        nodes, reach = list[Node](), list[float]()
        for token, parent in zip(block.tokens, block.parents, strict=True):
            above, chance = (self._root, 1.0) if parent == ROOT else (nodes[parent], reach[parent])
            node = above.children.get(token)
            if node is None:
                return None
            nodes.append(node)
            reach.append(chance * node.likely)
        return Part(nodes, reach)

    def outcomes(self, block: Part, num: int) -> list[Outcome]:
        """Where the text is likeliest to go on below `block` otherwise than by one of its nodes."""
        places = {id(self._root): (1.0, 0)}
        for node, reach in zip(block._nodes, block.reach.tolist(), strict=True):
            places[id(node)] = reach, places[id(node.parent)][1] + 1
        tops = [
            (places[id(above)][0] * node.likely, places[id(above)][1] + 1, node)
            for above in (self._root, *block._nodes)
            for node in above.children.values()
            if id(node) not in places
        ]
        tops.sort(key=lambda top: -top[0])
        return [Outcome(Part([node], [reach]), depth, self._at(node)) for reach, depth, node in tops[:num]]

    def _at(self, top: Node) -> SpeculationTree:
        """As if the text had got there."""
        tree = SpeculationTree()
        tree._root = top
        return tree

    # Verdicts

    def unverified(self, tokens: Sequence[int], block: Part) -> tuple[int, float] | None:
        """The draft's first candidate below these tokens, and how sure it was of it; None where it has told of none, or
        where `block` has it.
        """
        node: Node | None = self._root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
        first = next((child for child in node.children.values() if child.rank == 0), None) if node is not None else None
        return None if first is None or any(first is each for each in block._nodes) else (first.token, first.lead)

    def reroot(self, tokens: Sequence[int]) -> bool:
        """These were committed, and the last of them is the root from now on; whether the tree knew them.

        What the draft told below it stays, what it drew and what guessers proposed does not. A committed token has a
        place whether the draft has told of it or not: what it tells later hangs there.
        """
        is_known, root = True, self._root
        for token in tokens:
            is_known &= token in root.children
            following = root.child(token)
            root.children, root.is_passed = {token: following}, True
            self._trail.append(root := following)
        self._root = root
        self._forget_guesses()
        if self._is_drawn:
            root.children = {}
        while len(self._trail) > MAX_TRAIL:
            self._trail.popleft()
        self._trail[0].parent = None
        self.has_lost_some |= self.num_told > MAX_NUMBERS
        return is_known

    def _forget_guesses(self) -> None:
        """Nodes that only guessers know, and what they said of others."""
        for node in self._touched:
            node.guessed = 0.0
            if not (node.is_drafted or node.is_passed or node is self._root) and node.parent is not None:
                node.parent.children.pop(node.token, None)
                node.parent = None
        self._touched = []


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the text may go on below a block."""

    top: Part
    """The node that it goes on with."""
    depth: int
    """Below the root."""
    below: SpeculationTree
    """What has grown below the node."""


def _law(node: Node) -> SparseDistribution:
    """What it was drawn from; what was not drawn is sure of itself."""
    return node.q if node.q.probs else SparseDistribution.certain(node.token)
