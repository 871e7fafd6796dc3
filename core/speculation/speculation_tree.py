"""The orchestrator's half of a session's draft tree: what may come after the last committed token.

The draft tells of nodes pass by pass, guessers (`guesses`) propose some for the next block, blocks are taken out of it,
and a verdict makes another node the root. Nodes are objects, and committed tokens are nodes, too: so what a draft tells
hangs below its parent wherever the root is by then, and a verdict moves the root and little else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, repeat

from core.ranges import Range
from core.speculation.growth import UNRANKED, NewNodes, Unread, places_of
from core.speculation.guesser import Guesses
from core.speculation.token_tree import NO_Q, ROOT, SparseDistribution, TokenTree, depths
from core.speculation.tree_nodes import Node, Part

MAX_NUMBERS = 1 << 30
"""That a draft may use until it is asked to tell all anew, from 0: a message has room for twice as many."""
MAX_TRAIL = 512
"""Committed tokens that are remembered: what a draft tells hangs below one of the last few of them."""
DRAFT_TOKENS = Range(0, 64, is_whole=True)
"""Longest draft that the settings and a request may ask for, in tokens. A request may ask for more than the service."""
MAX_DEPTH = int(2 * DRAFT_TOKENS.high + 1)
"""Of what any policy has a draft grow, below the last token that it knows."""


class SpeculationTree:
    """Nodes below the last committed token, the root. Invariant: siblings differ."""

    def __init__(self, max_depth: int = MAX_DEPTH, *, is_drawn: bool = False) -> None:
        """`max_depth`: of what the draft grows below the last token that it knows, so that older news can be forgotten.

        `is_drawn`: whether blocks tell what each guess was drawn from, as rejection and block verification ask.
        """
        self._is_drawn = is_drawn
        self.num_reported = 0
        """Numbers that the draft has used: its next message begins there, or one was lost."""
        self.needs_full_report = False
        """Whether the draft knows nodes below the root of which it has told, and which are not here."""
        self._root = Node(ROOT)
        self._trail = deque([self._root])
        """The last committed tokens, the root at the end."""
        self._unread = Unread(max_depth)
        self._passed: dict[int, Node] = {}
        """By number, of those in the trail that have been passed."""
        self._touched: list[tuple[Node, Node]] = []
        """By guessers, for this root: each with its parent."""

    def __repr__(self) -> str:
        return f"<SpeculationTree {len(self)} nodes, {self.num_reported} told>"

    def __len__(self) -> int:
        nodes = [self._root]
        for node in nodes:
            nodes += self._children(node).values()
        return len(nodes) - 1

    @property
    def has_drafted(self) -> bool:
        """Whether the draft has told of anything that may follow."""
        return any(node.is_drafted for node in self._children(self._root).values())

    # Growing

    def add(self, new_nodes: NewNodes, num_unknown: int = 0) -> None:
        """What a draft tells that does not know of the last `num_unknown` committed tokens.

        A local node becomes the draft's. What was told before is dropped. Raises: ValueError when nodes were left out.
        """
        if new_nodes.first + len(new_nodes) <= self.num_reported and len(new_nodes):
            return
        if new_nodes.first != self.num_reported:
            raise ValueError(
                f"a draft's update begins at node {new_nodes.first}, but {self.num_reported} nodes are known"
            )
        if num_unknown == 0 and new_nodes.root != ROOT and new_nodes.root not in self._root.numbers:
            self.needs_full_report = True
        self._attach(new_nodes, self._trail[-1 - num_unknown] if num_unknown < len(self._trail) else None)
        self.num_reported += len(new_nodes)

    def _attach(self, new_nodes: NewNodes, root: Node | None) -> None:
        """`root` is what the draft calls so; None where that is too long ago."""
        parents: list[int] = new_nodes.parents.tolist()
        told = self._unread.add(new_nodes, parents)
        if root is not None:
            for place in places_of(parents, ROOT):
                self._materialize(root, new_nodes, place)
        for parent in sorted(told & self._passed.keys()):
            self._read_below(self._passed[parent])

    def _materialize(self, above: Node, new_nodes: NewNodes, place: int) -> None:
        """Make a node of what was told. Of two alike the first counts; where a token has followed, that one alone."""
        token, number = new_nodes.tokens.item(place), new_nodes.first + place
        node = above.children.get(token)
        if node is not None:
            self._name(node, number)
        elif not above.is_passed:  # else no verdict can lead there any more
            node = above.children[token] = Node(token, (number,))
        if node is not None and node.rank == UNRANKED:
            node.tell(new_nodes, place)

    def _name(self, node: Node, number: int) -> None:
        node.numbers += (number,)
        if node.is_passed:
            self._passed[number] = node
            self._read_below(node)

    def _children(self, node: Node) -> dict[int, Node]:
        """All of them, by token. Whoever asks has asked for those of its parent."""
        for number in node.numbers:
            for half in self._unread.halves:
                if number in half:
                    self._read_below(node)
        return node.children

    def _read_below(self, node: Node) -> None:
        """Make nodes of all that was told of what follows it, in the order in which it was told."""
        for _, new_nodes, place in self._unread.take(node.numbers):
            self._materialize(node, new_nodes, place)

    def _child(self, node: Node, token: int) -> Node:
        """The one that is `token`, which may have to be made."""
        children = self._children(node)
        found = children.get(token)
        if found is None:
            found = children[token] = Node(token)
        return found

    def guess(self, guesses: Guesses, source: str = "") -> None:
        """What a guesser proposes, until the next verdict. What is there already is the same node, whosever it is; of
        several guessers it is called that one's whose chance is the largest.
        """
        nodes: list[Node] = []
        laws = guesses.laws or repeat(NO_Q, len(guesses))
        for parent, token, chance, law in zip(guesses.parents, guesses.tokens, guesses.chances, laws, strict=True):
            above = self._root if parent == ROOT else nodes[parent]
            children = self._children(above) if above.numbers else above.children
            node = children.get(token)
            if node is None:
                node = children[token] = Node(token, q=law)
            if chance > node.guessed or not node.source:
                node.source = source
            node.guessed = max(node.guessed, chance)
            nodes.append(node)
            self._touched.append((above, node))

    # Taking

    def best(self, num_nodes: int, max_depth: int) -> Part:
        """The likeliest nodes, likeliest first: each comes after its parent, which is likelier."""
        nodes, reached, parents = list[Node](), list[float](), list[int]()
        order, heap = count(), list[tuple[float, int, int, int, Node]]()
        path_prob, depth, node = 1.0, 0, self._root
        while len(nodes) < num_nodes:
            if depth < max_depth:
                place = len(nodes) - 1  # `ROOT` at first
                for child in self._children(node).values():
                    chance = child.chance if child.chance > child.guessed else child.guessed
                    heappush(heap, (-path_prob * chance, next(order), depth + 1, place, child))
            if not heap:
                break
            path_prob, _, depth, parent, node = heappop(heap)
            path_prob = -path_prob
            nodes.append(node)
            reached.append(path_prob)
            parents.append(parent)
        return Part(nodes, reached, parents)

    def first_chain(self, max_depth: int) -> Part:
        """The draft's first candidate of the root, its first candidate of that, and so on: as far as it has told."""
        nodes, path_prob = list[Node](), [1.0]
        while len(nodes) < max_depth:
            above = nodes[-1] if nodes else self._root
            node = next((child for child in self._children(above).values() if child.rank == 0), None)
            if node is None:
                break
            nodes.append(node)
            path_prob.append(path_prob[-1] * node.likely)
        return Part(nodes, path_prob[1:], range(ROOT, len(nodes) - 1))

    def block(self, part: Part) -> TokenTree:
        """These nodes, whose parents are among them and come first."""
        laws = tuple([_law(node) for node in part._nodes]) if self._is_drawn else ()
        return TokenTree(tuple([node.token for node in part._nodes]), part.parents, laws)

    def part_of(self, block: TokenTree) -> Part | None:
        """Where the nodes of this block are; None unless all are here."""
        nodes, path_prob = list[Node](), list[float]()
        for token, parent in zip(block.tokens, block.parents, strict=True):
            above, chance = (self._root, 1.0) if parent == ROOT else (nodes[parent], path_prob[parent])
            node = self._children(above).get(token)
            if node is None:
                return None
            nodes.append(node)
            path_prob.append(chance * node.likely)
        return Part(nodes, path_prob, block.parents)

    def outcomes(self, block: Part, num: int) -> list[BlockOutcome]:
        """Where the text is likeliest to go on below `block` otherwise than by one of its nodes."""
        own = set(map(id, block._nodes))
        ends = zip(
            (self._root, *block._nodes),
            (1.0, *block.path_prob.tolist()),
            (0, *depths(block.parents)),
            count(ROOT),
            strict=False,
        )
        tops = [
            (path_prob * node.likely, depth + 1, end, node)
            for above, path_prob, depth, end in ends
            for node in self._children(above).values()
            if id(node) not in own
        ]
        tops.sort(key=lambda top: -top[0])
        return [
            BlockOutcome(end, Part([node], [path_prob], [ROOT]), depth, self._at(node))
            for path_prob, depth, end, node in tops[:num]
        ]

    def _at(self, top: Node) -> SpeculationTree:
        """As if the text had got there."""
        tree = SpeculationTree()
        tree._root, tree._unread = top, self._unread
        return tree

    # Verdicts

    def unverified(self, tokens: Sequence[int], block: Part) -> tuple[int, float] | None:
        """The draft's first candidate below these tokens, and how sure it was of it; None where it has told of none, or
        where `block` has it.
        """
        node: Node | None = self._root
        for token in tokens:
            node = self._children(node).get(token) if node is not None else None
        children = self._children(node).values() if node is not None else ()
        first = next((child for child in children if child.rank == 0), None)
        return None if first is None or any(first is each for each in block._nodes) else (first.token, first.confidence)

    def has_told_alone(self, token: int) -> bool:
        """Whether the draft has told that this may follow the root, and no guesser has."""
        node = self._children(self._root).get(token)
        return node is not None and node.is_drafted and not node.source

    def reroot(self, tokens: Sequence[int]) -> None:
        """These were committed, and the last of them is the root from now on.

        What the draft told below it stays, what it drew and what guessers proposed does not. A committed token has a
        place whether the draft has told of it or not: what it tells later hangs there.
        """
        for token in tokens:
            self._pass(token)
        self._forget_guesses()
        if self._is_drawn:
            self._root.children = {}
            self._unread.clear()
        self._unread.passed(len(tokens))
        while len(self._trail) > MAX_TRAIL:
            for number in self._trail.popleft().numbers:
                del self._passed[number]
        self.needs_full_report |= self.num_reported > MAX_NUMBERS

    def _pass(self, token: int) -> None:
        """No verdict can lead beside `token` any more."""
        above = self._root
        self._root = self._child(above, token)
        above.children, above.is_passed = {token: self._root}, True
        self._passed.update(dict.fromkeys(above.numbers, above))
        self._trail.append(self._root)

    def _forget_guesses(self) -> None:
        """Nodes that only guessers know, and what they said of others."""
        for above, node in self._touched:
            node.guessed, node.source = 0.0, ""
            is_local = self._children(above).get(node.token) is node and not node.is_drafted
            if is_local and not (node.is_passed or node is self._root):
                del above.children[node.token]
        self._touched = []


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """Where the text may go on below a block."""

    end: int
    """The node of the block below which that is."""
    top: Part
    """The node that it goes on with."""
    depth: int
    """Below the root."""
    below: SpeculationTree
    """What has grown below the node."""


def _law(node: Node) -> SparseDistribution:
    """What it was drawn from; what was not drawn is sure of itself."""
    return node.q if node.q.probs else SparseDistribution.certain(node.token)
