"""The draft's half of a session's draft tree: which nodes to feed next, and which new nodes to send.

Knows tokens, chances and the order of work; must not know models, KV or time. The draft engine feeds a real model with
it; the simulator replaces the model by a statistical one. Growth is best first, like the dynamic trees of EAGLE-2 (Li
et al. 2024, arXiv 2406.16858), but does not stop at a verdict: another node becomes the root, the tree below it stays,
and growth continues there. If the draft samples, it grows draws, and the shape is fixed beforehand (docs/exactness.md,
section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat

from core.speculation.candidates import Candidates
from core.speculation.chances import chances_of
from core.speculation.growth import Measure, NewNodes, TreeSpec
from core.speculation.token_tree import NO_TOKEN, ROOT

MIN_PATH_PROB = 4e-4
"""Nodes with a smaller path probability are neither fed nor sent."""


class TreeBuilder:
    """The tree of one session as its draft knows it. The root, node 0, is the last committed token.

    Attributes of nodes are lists, indexed by node until the next re-rooting. Passes are many and short, and numpy costs
    as much for a few numbers as for hundreds. Invariants: parents precede their children; nodes that were sent precede
    nodes that were not; the children of a node are its first candidates, in order.
    """

    def __init__(self) -> None:
        self.tree_spec = TreeSpec(1, 1)
        self.num_left = 0
        """Remaining passes, if growth ends by itself."""
        self.num_reported = 0
        self.begin()

    def __repr__(self) -> str:
        return f"<TreeBuilder {self.num_reported} nodes reported, {len(self._open)} open>"

    def __len__(self) -> int:
        """Number of nodes, including the root."""
        return len(self.tokens)

    def set_spec(self, tree_spec: TreeSpec) -> None:
        """Grow by this spec from now on. Existing nodes are rated again at the next re-rooting."""
        self.tree_spec, self.num_left = tree_spec, tree_spec.num_passes

    def begin(self) -> None:
        """Start an empty tree."""
        self.tokens = [ROOT]
        self.parents = [ROOT]
        self.ranks = [0]
        self.depths = [0]
        self.chances = [1.0]
        """Chance of each node, given its parent."""
        self.path_prob = [1.0]
        """Path probability of each node."""
        self.numbers = [ROOT]
        """Number under which each node was sent, for nodes that were sent; `ROOT` for the root."""
        self.rows: dict[int, int] = {}
        """Row of each fed node, in the order of feeding; the root's is 0."""
        self._candidates: list[Candidates] = []
        """The model's candidates, by row."""
        self._children: list[list[int]] = []
        """Children by row, in the order of their ranks."""
        self._margins: list[float] = []
        """Margin by row."""
        self._confidences: list[float] = []
        """Confidence by row, by the requested measure."""
        self._open: list[tuple[float, int]] = []
        """Heap of (-path probability, node) of the nodes that may be fed. The older node comes first on ties."""
        self.feeding: list[int] = []
        """Nodes being fed, likeliest first."""

    @property
    def has_root(self) -> bool:
        """Whether the model's candidates after the root are known."""
        return bool(self.rows)

    @property
    def being_fed(self) -> list[int]:
        """Nodes being fed; the root if it has not been fed yet."""
        return self.feeding if self.has_root else [0]

    @property
    def best_path_prob(self) -> float:
        """Path probability of the likeliest node that may be fed next; 0 if there is none."""
        return -self._open[0][0] if self._open else 0.0

    @property
    def has_fed_all(self) -> bool:
        """Whether nothing can be fed until the next re-rooting."""
        return not self._open and not self.feeding

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to the node."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def children(self, node: int) -> list[int]:
        """Children in the order of their ranks."""
        return self._children[self.rows[node]] if node in self.rows else []

    def child(self, node: int, token: int) -> int | None:
        """The child with this token, or None."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def held_parent(self, node: int) -> int:
        """The node's parent in a `HeldTree` that holds exactly the fed nodes; `ROOT` for the root."""
        return self.rows[self.parents[node]] - 1

    # Feeding

    def feed(self) -> None:
        """Choose the likeliest open node for feeding."""
        self.feeding.append(heappop(self._open)[1])

    def feed_only(self, node: int) -> bool:
        """Choose this open node for feeding, unless it is too unlikely or another one comes first. Return whether
        chosen."""
        if self.tree_spec.ends:
            self.feed_pass(1)
            if self.feeding != [node]:
                self.put_back()
        elif self.path_prob[node] >= self.tree_spec.min_path_prob:
            self._open.remove((-self.path_prob[node], node))
            heapify(self._open)
            self.feeding.append(node)
        return bool(self.feeding)

    def put_back(self, min_path_prob: float = math.inf) -> None:
        """Return chosen nodes with a smaller path probability to the open ones."""
        while self.feeding and self.path_prob[self.feeding[-1]] < min_path_prob:
            self._push(self.feeding.pop())

    def take(self, candidates: Sequence[Candidates]) -> None:
        """Add the model's candidates after each of the nodes being fed."""
        margins = [each.margin for each in candidates]
        self.extend(candidates, margins, chances_of(candidates, margins, [(self.tree_spec, len(candidates))]))

    # Growth that ends by itself

    def feed_pass(self, num_rows: int) -> None:
        """Choose the nodes of the next pass, at most `num_rows`; none if growth has ended."""
        max_rows = min(num_rows, self.tree_spec.rows_per_pass) if self.num_left else 0
        while len(self.feeding) < max_rows and self._open:
            self.feed()
        if sum(self.path_prob[node] for node in self.feeding) < self.tree_spec.min_path_prob:
            self.put_back()

    @property
    def has_ended(self) -> bool:
        """Whether no pass is left, or none is likely enough to be worth it."""
        if self.feeding:
            return False
        self.feed_pass(self.tree_spec.rows_per_pass)
        is_fed = bool(self.feeding)
        self.put_back()
        return not is_fed

    def count_pass(self) -> None:
        """Count one pass, including the root's."""
        self.num_left = max(0, self.num_left - 1)

    # Reporting

    def report(self) -> NewNodes:
        """Return the nodes that have not been sent yet, parents first."""
        first, start = self.num_reported, len(self.numbers)
        self.num_reported += len(self) - start
        self.numbers += range(first, self.num_reported)
        parents = self.parents[start:]
        rows = [self.rows[parent] for parent in parents]
        return NewNodes(
            first,
            [self.numbers[parent] for parent in parents],
            self.tokens[start:],
            self.ranks[start:],
            self.chances[start:],
            [self._confidences[row] for row in rows],
            self.numbers[0],
            [self._candidates[row].q for row in rows if self._candidates[row].sampled != NO_TOKEN],
            is_own=True,
        )

    def report_all_again(self) -> None:
        """Send all nodes again with the next report, because the orchestrator has lost some."""
        self.num_reported, self.numbers = 0, [ROOT]

    # Verdicts

    def reroot(self, tokens: Sequence[int]) -> bool:
        """Move the root down by `tokens`. Return whether the tree has them; if not, it is emptied."""
        root = 0
        for token in tokens:
            found = self.child(root, token)
            if found is None:
                self.begin()
                return False
            root = found
        self._keep(root)
        self._rate()
        return True

    def _keep(self, root: int) -> None:
        """Drop all nodes that are not below `root`."""
        kept, top = [root], self.depths[root]
        for node in kept:
            kept += self.children(node)
        kept.sort()
        moved = {node: index for index, node in enumerate(kept)}
        self.tokens = [self.tokens[node] for node in kept]
        self.ranks = [self.ranks[node] for node in kept]
        self.chances = [self.chances[node] for node in kept]
        self.path_prob = [self.path_prob[node] for node in kept]
        self.parents = [ROOT, *(moved[self.parents[node]] for node in kept[1:])]
        self.depths = [self.depths[node] - top for node in kept]
        self.numbers = [self.numbers[node] for node in kept if node < len(self.numbers)] or [ROOT]
        self.feeding = [moved[node] for node in self.feeding if moved.get(node)]
        fed = [(moved[node], row) for node, row in self.rows.items() if node in moved]
        self.rows = {node: row for row, (node, _) in enumerate(fed)}
        self._candidates = [self._candidates[row] for _, row in fed]
        self._children = [[moved[child] for child in self._children[row]] for _, row in fed]
        self._margins = [self._margins[row] for _, row in fed]

    # Rating

    def _rate(self) -> None:
        """Recompute chances and open nodes after a re-rooting."""
        chances = chances_of(self._candidates, self._margins, [(self.tree_spec, len(self._candidates))])
        self._confidences, self.path_prob[0] = self._confidences_of(self._candidates, self._margins), 1.0
        for node in range(1, len(self)):
            parent, rank = self.parents[node], self.ranks[node]
            if rank < len(rated := chances[self.rows[parent]]):
                self.chances[node] = rated[rank]
            self.path_prob[node] = self.path_prob[parent] * self.chances[node]
        waiting = set(range(1, len(self))).difference(self.rows, self.feeding)
        self._open = [(-self.path_prob[node], node) for node in waiting if self.depths[node] < self.tree_spec.max_depth]
        heapify(self._open)
        for node in sorted(self.rows):
            self._grow(node, chances[self.rows[node]])

    def extend(
        self, candidates: Sequence[Candidates], margins: Sequence[float], chances: Iterable[Sequence[float]]
    ) -> None:
        """Add the model's candidates after each of the nodes being fed, with their margins and chances."""
        nodes, self.feeding = self.being_fed, []
        self.rows.update(zip(nodes, range(len(self.rows), len(self.rows) + len(nodes)), strict=True))
        self._candidates += candidates
        self._children += [[] for _ in nodes]
        self._margins += margins
        self._confidences += self._confidences_of(candidates, margins)
        for node, each in zip(nodes, chances, strict=True):
            self._grow(node, each)

    def _confidences_of(self, candidates: Sequence[Candidates], margins: Sequence[float]) -> list[float]:
        measure = self.tree_spec.measure
        return list(margins) if measure is Measure.MARGIN else [each.confidence_by(measure) for each in candidates]

    def _grow(self, node: int, chances: Sequence[float]) -> None:
        """Add children for the candidates that are likely enough and not there yet."""
        row, depth, path_prob = self.rows[node], self.depths[node] + 1, self.path_prob[node]
        if depth > self.tree_spec.max_depth or self._confidences[row] < self.tree_spec.min_confidence:
            return
        children, new, tokens = self._children[row], list[float](), self._candidates[row].guesses
        num_there = len(children)
        for chance in chances[num_there : len(tokens)]:
            if path_prob * chance < MIN_PATH_PROB:
                break
            new.append(path_prob * chance)
        if not new:
            return
        first, num, end = len(self.tokens), len(new), num_there + len(new)
        children += range(first, first + num)
        self.tokens += tokens[num_there:end]
        self.parents += repeat(node, num)
        self.ranks += range(num_there, end)
        self.depths += repeat(depth, num)
        self.chances += chances[num_there:end]
        self.path_prob += new
        if depth < self.tree_spec.max_depth:
            for child, each in enumerate(new, first):
                heappush(self._open, (-each, child))

    def _push(self, node: int) -> None:
        heappush(self._open, (-self.path_prob[node], node))
