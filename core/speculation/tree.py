"""The orchestrator's half of a session's speculation tree: what may come after the last committed token.

Guessers add nodes, blocks are taken out of it, and a verdict makes another node the root. Columns, not objects: what a
draft tells after a pass is one append, and a verdict one mask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.trees import ROOT, TokenTree, Told

GONE = -2
"""Where a node was, that no verdict can lead to any more."""
NOT_DRAFTED = -1
TOKENS = 1 << 32
"""More than there are token ids."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SpeculationTree:
    """Nodes below the last committed token. Invariant: parents precede their children, and siblings differ."""

    def __init__(self) -> None:
        self.tokens: Ints = np.empty(0, np.int64)
        self.parents: Ints = np.empty(0, np.int64)
        self.depths: Ints = np.empty(0, np.int64)
        self.ranks: Ints = np.empty(0, np.int64)
        self.leads: Floats = np.empty(0)
        self.chances: Floats = np.empty(0)
        self.reach: Floats = np.empty(0)
        """Chance that the text gets to the node; below its parent's."""
        self._serials: Ints = np.empty(0, np.int64)
        """Number that the draft gave to each node; `NOT_DRAFTED` for others."""
        self._root_serial = NOT_DRAFTED
        self._place_of: Ints = np.empty(0, np.int64)
        """For each number that the draft has used: the node, `ROOT` or `GONE`."""
        self.has_lost_some = False
        """Whether the draft knows nodes below the root of which it has told, and which are not here."""
        self._lost: tuple[int, int] | None = None
        """Number of the parent, and token, of a root that nobody had told of when the verdict came."""

    def __repr__(self) -> str:
        return f"<SpeculationTree {len(self)} nodes, {self.num_told} told>"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_told(self) -> int:
        """Numbers that the draft has used: its next message begins there, or one was lost."""
        return len(self._place_of)

    # Growing

    def add(self, told: Told, num_unknown: int = 0) -> int:
        """What a draft tells that does not know of the last `num_unknown` verdicts; how many nodes are new and of use.

        What was told before is dropped. Raises: ValueError when nodes were left out.
        """
        if told.first + len(told) <= self.num_told and len(told):
            return 0
        if told.first != self.num_told:
            raise ValueError(f"a draft goes on at node {told.first} where {self.num_told} have been told")
        parents = np.array(told.parents, np.int64)
        if num_unknown == 0 and told.root != ROOT and self._place_of[told.root] != ROOT:
            self.has_lost_some = True
        num_before, start = len(self), 0
        while start < len(told):
            end = start + int(np.argmax(np.append(parents[start:] >= told.first + start, True)))
            self._append(told, slice(start, end), num_unknown)
            start = end
        return len(self) - num_before

    def _append(self, told: Told, part: slice, num_unknown: int) -> None:
        """Nodes whose parents were told before them."""
        parents, tokens = np.array(told.parents[part], np.int64), np.array(told.tokens[part], np.int64)
        at_root = ROOT if num_unknown == 0 else GONE
        places = np.where(parents == ROOT, at_root, self._place_of[parents] if self.num_told else at_root)
        found = self._numbered(places, tokens)
        alive = found >= len(self)
        alive &= np.append(True, found[1:] > np.maximum.accumulate(found)[:-1])  # of two alike the first is added
        if self._lost is not None and num_unknown > 0:
            parent, token = self._lost
            is_lost = (parents == parent) & (tokens == token)
            if is_lost.any() and (parent != ROOT or num_unknown == 1):  # others mean an earlier root by it
                found[is_lost] = ROOT
                self._root_serial, self._lost = self.num_told + int(np.argmax(is_lost)), None
        serials = self.num_told + np.nonzero(alive)[0]
        self._place_of = np.concatenate([self._place_of, found])
        self._extend(
            places[alive],
            tokens[alive],
            np.array(told.ranks[part], np.int64)[alive],
            np.array(told.chances[part])[alive],
            np.array(told.leads[part])[alive],
            serials,
        )

    def _numbered(self, parents: Ints, tokens: Ints) -> Ints:
        """Of each the node that it is, or will be: new ones in order, those alike the same, `GONE` below none."""
        is_there = parents != GONE
        keys = np.concatenate([self.parents, parents[is_there]]) * TOKENS
        keys += np.concatenate([self.tokens, tokens[is_there]])
        nodes = np.arange(len(keys))
        if len(np.unique(keys)) < len(keys):  # a sound draft repeats nothing but what it has forgotten
            first: dict[int, int] = {}
            for place, key in enumerate(keys.tolist()):
                nodes[place] = first.setdefault(key, len(first))
        found = np.full(len(parents), GONE, np.int64)
        found[is_there] = nodes[len(self) :]
        return found

    def _extend(self, parents: Ints, tokens: Ints, ranks: Ints, chances: Floats, leads: Floats, serials: Ints) -> None:
        above = np.append(self.reach, 1.0)[parents]  # the root is at the end, where -1 finds it
        deep = np.append(self.depths, 0)[parents]
        self.parents = np.concatenate([self.parents, parents])
        self.tokens = np.concatenate([self.tokens, tokens])
        self.depths = np.concatenate([self.depths, deep + 1])
        self.ranks = np.concatenate([self.ranks, ranks])
        self.leads = np.concatenate([self.leads, leads])
        self.chances = np.concatenate([self.chances, chances])
        self.reach = np.concatenate([self.reach, above * chances])
        self._serials = np.concatenate([self._serials, serials])

    # Taking

    def best(self, num_nodes: int, max_depth: int, min_reach: float = 0.0) -> Ints:
        """The likeliest nodes, likeliest first: each comes after its parent, which is likelier."""
        fits = np.nonzero((self.reach >= min_reach) & (self.depths <= max_depth))[0]
        return fits[np.argsort(-self.reach[fits], kind="stable")[:num_nodes]]

    def branches(self, nodes: Ints) -> Ints:
        """How many branches, beside the first, each of these and those before it have: a parent's later children."""
        is_later = np.ones(len(nodes), np.int64)
        is_later[np.unique(self.parents[nodes], return_index=True)[1]] = 0
        return np.cumsum(is_later)

    def straight(self, nodes: Ints) -> Ints:
        """Of these nodes, which come after their parents, the chain from the root on that always takes the first."""
        chain, end = [], ROOT
        for node, parent in zip(nodes.tolist(), self.parents[nodes].tolist(), strict=True):
            if parent == end:
                chain.append(node)
                end = node
        return np.array(chain, np.int64)

    def block(self, nodes: Ints) -> TokenTree:
        """These nodes, whose parents are among them and come first."""
        number = np.full(len(self) + 1, ROOT, np.int64)
        number[nodes] = np.arange(len(nodes))
        return TokenTree(tuple(self.tokens[nodes].tolist()), tuple(number[self.parents[nodes]].tolist()))

    @property
    def leaves(self) -> Ints:
        """Nodes below which nothing is known, the likeliest first: a draft feeds them in its next passes."""
        has_children = np.zeros(len(self) + 1, np.bool_)
        has_children[self.parents] = True
        found = np.nonzero(~has_children[:-1])[0]
        return found[np.argsort(-self.reach[found], kind="stable")]

    # Verdicts

    def children(self, parent: int) -> Ints:
        """In the order of their ranks."""
        found = np.nonzero(self.parents == parent)[0]
        return found[np.argsort(self.ranks[found], kind="stable")]

    def child(self, parent: int, token: int) -> int | None:
        """The node below `parent` that is `token`."""
        found = np.nonzero((self.parents == parent) & (self.tokens == token))[0]
        return int(found[0]) if len(found) else None

    def prune(self) -> None:
        """The text went where no node leads."""
        self._keep(np.zeros(len(self), np.bool_), GONE)
        self._root_serial, self._lost = NOT_DRAFTED, None

    def reroot(self, end: int, token: int) -> bool:
        """`token` was committed below node `end` (or ROOT), and is the root from now on; whether the tree had it."""
        child = self.child(end, token)
        parent_serial = self._root_serial if end == ROOT else int(self._serials[end])
        is_current_root = end == ROOT and self._root_serial == NOT_DRAFTED
        if child is None:
            self._keep(np.zeros(len(self), np.bool_), GONE)
            is_known = parent_serial != NOT_DRAFTED or is_current_root
            self._lost = (parent_serial if not is_current_root else ROOT, token) if is_known else None
            self._root_serial = NOT_DRAFTED
            return False
        self._root_serial, self._lost = int(self._serials[child]), None
        self._keep(self._below(child), child)
        return True

    def _below(self, top: int) -> NDArray[np.bool_]:
        """Which nodes grew below `top`."""
        is_below = np.zeros(len(self) + 1, np.bool_)
        is_below[top] = True
        for depth in range(int(self.depths[top]) + 1, int(self.depths.max()) + 1):
            level = np.nonzero(self.depths == depth)[0]
            is_below[level] = is_below[self.parents[level]]
        is_below[top] = False
        return is_below[:-1]

    def _keep(self, kept: NDArray[np.bool_], root: int) -> None:
        """Forget all other nodes; what is kept grew below `root`."""
        number = np.full(len(self) + 2, GONE, np.int64)  # at the end, where -2 and -1 find them: GONE, and the old root
        number[np.nonzero(kept)[0]] = np.arange(int(kept.sum()))
        if root != GONE:
            number[root] = ROOT
            self.reach = self.reach / self.reach[root]
            self.depths = self.depths - self.depths[root]
        self.parents = number[self.parents[kept]]
        self.tokens, self.ranks, self.leads = self.tokens[kept], self.ranks[kept], self.leads[kept]
        self.depths, self.chances, self.reach = self.depths[kept], self.chances[kept], self.reach[kept]
        self._serials = self._serials[kept]
        self._place_of = number[self._place_of]
