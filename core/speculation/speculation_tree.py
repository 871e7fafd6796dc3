"""The orchestrator's half of a session's draft tree: continuations of the last committed token.

The draft sends nodes pass by pass, guessers propose nodes for the next block, blocks are taken out of the tree, and a
verdict makes another node the root. Committed tokens stay nodes, so a late message of the draft can still attach its
nodes to their parents, and a verdict changes little except the root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, repeat

from core.ranges import Range
from core.speculation.growth import UNRANKED, NewNodes, UnreadNodes, indices_of
from core.speculation.guesser import Guesses
from core.speculation.token_tree import NO_Q, ROOT, SparseDistribution, TokenTree, depths
from core.speculation.tree_nodes import Node, Part

MAX_NUMBERS = 1 << 30
"""When node numbers reach this, the draft is asked to send all its nodes again, numbered from 0. A message has room for
twice as many."""
MAX_TRAIL = 512
"""Number of committed tokens that stay nodes. New nodes of the draft attach to one of the last few of them."""
DRAFT_TOKENS = Range(0, 64, is_whole=True)
"""Longest draft that the settings and a request may ask for, in tokens. A request may ask for more than the service."""
MAX_DEPTH = int(2 * DRAFT_TOKENS.high + 1)
"""Largest depth that any policy lets a draft grow below the last token it knows."""


class SpeculationTree:
    """Nodes below the last committed token, the root. Invariant: siblings differ."""

    def __init__(self, max_depth: int = MAX_DEPTH, *, is_sampled: bool = False) -> None:
        """`max_depth`: largest depth that the draft grows below the last token it knows; older messages can be dropped.

        `is_sampled`: whether blocks carry the q of each guess, as rejection and block verification need.
        """
        self._is_sampled = is_sampled
        self.num_reported = 0
        """Number of nodes that the draft has sent. Its next message must begin at this number."""
        self.needs_full_report = False
        """Whether the draft has sent nodes below the root that are missing here."""
        self._root = Node(ROOT)
        self._trail = deque([self._root])
        """The last committed tokens, ending with the root."""
        self._unread = UnreadNodes(max_depth)
        self._above_root: dict[int, Node] = {}
        """Nodes that precede the root, by the draft's number."""
        self._guessed: list[tuple[Node, Node]] = []
        """(parent, node) of each node proposed by a guesser for this root."""

    def __repr__(self) -> str:
        return f"<SpeculationTree {len(self)} nodes, {self.num_reported} reported>"

    def __len__(self) -> int:
        nodes = [self._root]
        for node in nodes:
            nodes += self._children(node).values()
        return len(nodes) - 1

    @property
    def has_drafted(self) -> bool:
        """Whether the draft has sent a child of the root."""
        return any(node.is_drafted for node in self._children(self._root).values())

    # Growing

    def add(self, new_nodes: NewNodes, num_unknown: int = 0) -> None:
        """Add nodes from the draft. It did not know the last `num_unknown` committed tokens when it sent them.

        A local node that the draft sends too becomes the draft's. A message received before is dropped. Raises:
        ValueError if nodes are missing between this message and the last.
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
        """Attach the nodes. `root` is the draft's root; None if it is no longer kept."""
        parents: list[int] = new_nodes.parents.tolist()
        sent_below = self._unread.add(new_nodes, parents)
        if root is not None:
            for index in indices_of(parents, ROOT):
                self._materialize(root, new_nodes, index)
        for parent in sorted(sent_below & self._above_root.keys()):
            self._read_below(self._above_root[parent])

    def _materialize(self, above: Node, new_nodes: NewNodes, index: int) -> None:
        """Make a `Node` of one sent node. If the tree has it, its data stays. A committed token gets no siblings."""
        token, number = new_nodes.tokens.item(index), new_nodes.first + index
        node = above.children.get(token)
        if node is not None:
            self._add_number(node, number)
        elif not above.is_above_root:  # no verdict can reach a sibling of a committed token
            node = above.children[token] = Node(token, (number,))
        if node is not None and node.rank == UNRANKED:
            node.take_over(new_nodes, index)

    def _add_number(self, node: Node, number: int) -> None:
        node.numbers += (number,)
        if node.is_above_root:
            self._above_root[number] = node
            self._read_below(node)

    def _children(self, node: Node) -> dict[int, Node]:
        """All children by token, read first if unread. The parent's children must have been read before."""
        for number in node.numbers:
            for generation in self._unread.generations:
                if number in generation:
                    self._read_below(node)
        return node.children

    def _read_below(self, node: Node) -> None:
        """Make nodes of all unread children of `node`, in the order in which they were sent."""
        for _, new_nodes, index in self._unread.take(node.numbers):
            self._materialize(node, new_nodes, index)

    def _child(self, node: Node, token: int) -> Node:
        """The child with this token; made if missing."""
        children = self._children(node)
        found = children.get(token)
        if found is None:
            found = children[token] = Node(token)
        return found

    def add_guesses(self, guesses: Guesses, source: str = "") -> None:
        """Add a guesser's proposals, which stay until the next verdict.

        A proposal that equals an existing node is merged with it. The node's source is the guesser with the largest
        chance.
        """
        nodes: list[Node] = []
        qs = guesses.distributions or repeat(NO_Q, len(guesses))
        for parent, token, chance, q in zip(guesses.parents, guesses.tokens, guesses.chances, qs, strict=True):
            above = self._root if parent == ROOT else nodes[parent]
            children = self._children(above) if above.numbers else above.children
            node = children.get(token)
            if node is None:
                node = children[token] = Node(token, q=q)
            if chance > node.guessed or not node.source:
                node.source = source
            node.guessed = max(node.guessed, chance)
            nodes.append(node)
            self._guessed.append((above, node))

    # Taking

    def best(self, num_nodes: int, max_depth: int) -> Part:
        """The likeliest nodes, likeliest first. A parent comes before its children, because it is at least as
        likely."""
        nodes, reached, parents = list[Node](), list[float](), list[int]()
        order, heap = count(), list[tuple[float, int, int, int, Node]]()
        path_prob, depth, node = 1.0, 0, self._root
        while len(nodes) < num_nodes:
            if depth < max_depth:
                index = len(nodes) - 1  # `ROOT` at first
                for child in self._children(node).values():
                    chance = child.chance if child.chance > child.guessed else child.guessed
                    heappush(heap, (-path_prob * chance, next(order), depth + 1, index, child))
            if not heap:
                break
            path_prob, _, depth, parent, node = heappop(heap)
            path_prob = -path_prob
            nodes.append(node)
            reached.append(path_prob)
            parents.append(parent)
        return Part(nodes, reached, parents)

    def first_chain(self, max_depth: int) -> Part:
        """The chain of the draft's first candidates from the root down, as far as the draft has sent it."""
        nodes, path_prob = list[Node](), [1.0]
        while len(nodes) < max_depth:
            above = nodes[-1] if nodes else self._root
            node = next((child for child in self._children(above).values() if child.rank == 0), None)
            if node is None:
                break
            nodes.append(node)
            path_prob.append(path_prob[-1] * node.best_chance)
        return Part(nodes, path_prob[1:], range(ROOT, len(nodes) - 1))

    def block(self, part: Part) -> TokenTree:
        """The block of these nodes. Every parent must be in `part`, before its children."""
        qs = tuple([_q_of(node) for node in part._nodes]) if self._is_sampled else ()
        return TokenTree(tuple([node.token for node in part._nodes]), part.parents, qs)

    def part_of(self, block: TokenTree) -> Part | None:
        """The tree's nodes that equal the nodes of `block`; None if any is missing."""
        nodes, path_prob = list[Node](), list[float]()
        for token, parent in zip(block.tokens, block.parents, strict=True):
            above, chance = (self._root, 1.0) if parent == ROOT else (nodes[parent], path_prob[parent])
            node = self._children(above).get(token)
            if node is None:
                return None
            nodes.append(node)
            path_prob.append(chance * node.best_chance)
        return Part(nodes, path_prob, block.parents)

    def outcomes(self, block: Part, num: int) -> list[BlockOutcome]:
        """The `num` likeliest continuations of `block` outside its own nodes, likeliest first."""
        own = set(map(id, block._nodes))
        ends = zip(
            (self._root, *block._nodes),
            (1.0, *block.path_prob.tolist()),
            (0, *depths(block.parents)),
            count(ROOT),
            strict=False,
        )
        tops = [
            (path_prob * node.best_chance, depth + 1, end, node)
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
        """The tree with `top` as its root. Shares nodes with this tree."""
        tree = SpeculationTree()
        tree._root, tree._unread = top, self._unread
        return tree

    # Verdicts

    def unverified(self, tokens: Sequence[int], block: Part) -> tuple[int, float] | None:
        """The draft's first candidate after these tokens, and its confidence.

        None if the draft has sent none, or if the candidate is in `block`.
        """
        node: Node | None = self._root
        for token in tokens:
            node = self._children(node).get(token) if node is not None else None
        children = self._children(node).values() if node is not None else ()
        first = next((child for child in children if child.rank == 0), None)
        return None if first is None or any(first is each for each in block._nodes) else (first.token, first.confidence)

    def is_only_drafted(self, token: int) -> bool:
        """Whether the draft has sent `token` as a child of the root, and no guesser has proposed it."""
        node = self._children(self._root).get(token)
        return node is not None and node.is_drafted and not node.source

    def reroot(self, tokens: Sequence[int]) -> None:
        """Commit `tokens`; the last one becomes the root.

        Nodes below it that the draft sent stay. Draws and guessers' proposals are dropped. Every committed token
        becomes a node, whether or not the draft has sent it, so that later messages can attach to it.
        """
        for token in tokens:
            self._commit(token)
        self._forget_guesses()
        if self._is_sampled:
            self._root.children = {}
            self._unread.clear()
        self._unread.commit(len(tokens))
        while len(self._trail) > MAX_TRAIL:
            for number in self._trail.popleft().numbers:
                del self._above_root[number]
        self.needs_full_report |= self.num_reported > MAX_NUMBERS

    def _commit(self, token: int) -> None:
        """Commit one token and drop its siblings, which no verdict can reach any more."""
        above = self._root
        self._root = self._child(above, token)
        above.children, above.is_above_root = {token: self._root}, True
        self._above_root.update(dict.fromkeys(above.numbers, above))
        self._trail.append(self._root)

    def _forget_guesses(self) -> None:
        """Drop local nodes, and the guessers' chances of all others."""
        for above, node in self._guessed:
            node.guessed, node.source = 0.0, ""
            is_local = self._children(above).get(node.token) is node and not node.is_drafted
            if is_local and not (node.is_above_root or node is self._root):
                del above.children[node.token]
        self._guessed = []


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """A likely continuation of a block, outside its nodes."""

    end: int
    """Index in the block of the node it follows, or `ROOT`."""
    top: Part
    """The first node of the continuation, as a `Part` with one node."""
    depth: int
    """Depth of `top` below the root."""
    below: SpeculationTree
    """The tree below `top`."""


def _q_of(node: Node) -> SparseDistribution:
    """The distribution the node was drawn from. For a token that was not drawn: all mass on the token."""
    return node.q if node.q.probs else SparseDistribution.certain(node.token)
