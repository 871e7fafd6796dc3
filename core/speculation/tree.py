"""The orchestrator's half of a session's speculation tree: what may come after the last committed token.

The draft tells of nodes pass by pass, guessers (`guesses`) propose some for the next block, blocks are taken out of it,
and a verdict makes another node the root. Columns, not objects: what a draft tells after a pass is one append, and a
verdict one mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from core.speculation.guesses import Guesses
from core.trees import ROOT, UNRANKED, Floats, Ints, SparseDistribution, TokenTree, Told

GONE = -(1 << 40)
"""Where a node was, that no verdict can lead to any more."""
MAX_NUMBERS = 1 << 30
"""That a draft may use until it is asked to tell all anew, from 0: a message has room for twice as many."""
MAX_TRAIL = 512
"""Committed tokens that are remembered: what a draft tells hangs below one of the last few of them."""
TOKENS = 1 << 32
"""More than there are token ids."""

Bools = NDArray[np.bool_]


class SpeculationTree:
    """Nodes below the last committed token. Invariant: parents precede their children, and siblings differ.

    A *place* is a node, or `ROOT`, or a committed token: k tokens before the root it is `ROOT - k`.
    """

    def __init__(self, *, is_drawn: bool = False) -> None:
        """`is_drawn`: whether blocks tell what each guess was drawn from, as rejection and block verification ask."""
        self._is_drawn = is_drawn
        self.num_told = 0
        """Numbers that the draft has used: its next message begins there, or one was lost."""
        self.has_lost_some = False
        """Whether the draft knows nodes below the root of which it has told, and which are not here."""
        self._take_columns(np.empty((4, 0), np.int64), np.empty((4, 0)))
        self._has_local = False
        self._q: dict[int, SparseDistribution] = {}
        """Of each node that was drawn, what it was drawn from. It is of use for one block: a verdict forgets it."""
        self._numbers: Ints = np.empty((2, 0), np.int64)
        """The draft's numbers of what a verdict can lead to, or has led to, rising; below each its place."""
        self._trail: Ints = np.empty(0, np.int64)
        """The last committed tokens: what follows place `ROOT - k` is `_trail[-k]`."""

    def __repr__(self) -> str:
        return f"<SpeculationTree {len(self)} nodes, {self.num_told} told>"

    def __len__(self) -> int:
        return len(self.tokens)

    def _take_columns(self, ints: Ints, floats: Floats) -> None:
        """Two arrays, since numpy asks as much for an array of few numbers as for one of many."""
        self._ints, self._floats = ints, floats
        self.tokens: Ints
        self.parents: Ints
        self.depths: Ints
        self.ranks: Ints
        """Among the draft's candidates; `UNRANKED` for nodes that it has not told of: local ones."""
        self.tokens, self.parents, self.depths, self.ranks = ints
        self.leads: Floats
        self.chances: Floats
        """By the draft, that the text goes on with the node, if it gets to its parent; 0 for local nodes."""
        self.guessed: Floats
        """The same by the guessers, for this root; 0 where none guesses the node."""
        self.reach: Floats
        """Chance that the text gets to the node: of each on the way the larger of the two. Below its parent's."""
        self.leads, self.chances, self.guessed, self.reach = floats

    @property
    def is_drafted(self) -> Bools:
        """Which nodes the draft has told of."""
        return np.not_equal(self.ranks, UNRANKED)

    def places_of(self, numbers: Ints) -> Ints:
        """Where the nodes are that the draft calls so; `GONE` for those that no verdict can lead to any more."""
        known, places = self._numbers
        if not len(known):
            return np.full(len(numbers), GONE, np.int64)
        at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return np.where(known[at] == numbers, places[at], GONE)

    # Growing

    def add(self, told: Told, num_unknown: int = 0) -> int:
        """What a draft tells that does not know of the last `num_unknown` committed tokens; how many nodes are new.

        A local node becomes the draft's. What was told before is dropped. Raises: ValueError when nodes were left out.
        """
        if told.first + len(told) <= self.num_told and len(told):
            return 0
        if told.first != self.num_told:
            raise ValueError(f"a draft goes on at node {told.first} where {self.num_told} have been told")
        if num_unknown == 0 and told.root != ROOT and self.places_of(np.array([told.root]))[0] != ROOT:
            self.has_lost_some = True
        num_before, start = len(self), 0
        while start < len(told):
            is_told_here = told.parents[start:] >= told.first + start
            end = start + int(is_told_here.argmax()) if is_told_here.any() else len(told)
            self._append(told, slice(start, end), ROOT - num_unknown)
            start = end
        return len(self) - num_before

    def _append(self, told: Told, part: slice, root: int) -> None:
        """Nodes whose parents were told before them; `root` is the place that the draft calls so."""
        parents, tokens = told.parents[part], told.tokens[part]
        places = self.places_of(parents)
        places[parents == ROOT] = root
        found = self._numbered(places, tokens)
        is_new = found >= len(self)
        if (found != len(self) + np.arange(len(found))).any():
            is_new &= np.append(True, found[1:] > np.maximum.accumulate(found)[:-1])  # of two alike the first is added
            self._find_passed(places, tokens, found)
            self._claim(found, told, part)
        self._number(self.num_told, found)
        self._extend(places, tokens, told, part, is_new)
        self.num_told += len(found)

    def _find_passed(self, places: Ints, tokens: Ints, found: Ints) -> None:
        """Nodes that are committed tokens by now."""
        is_passed = (places < ROOT) & (places >= ROOT - len(self._trail))
        is_passed[is_passed] = self._trail[places[is_passed] + 1] == tokens[is_passed]
        found[is_passed] = places[is_passed] + 1

    def _number(self, first: int, places: Ints) -> None:
        """The draft's next numbers; those of nodes that are gone need no place."""
        numbers = np.stack([np.arange(first, first + len(places)), places])
        self._numbers = np.concatenate([self._numbers, numbers[:, places != GONE]], axis=1)

    def _claim(self, found: Ints, told: Told, part: slice) -> None:
        """Local nodes among those that the draft tells of become its own."""
        if not self._has_local:
            return
        is_there = (found >= 0) & (found < len(self))
        local = [index for index in np.nonzero(is_there)[0] if self.ranks[found[index]] == UNRANKED]
        for index in reversed(local):  # of two alike the first counts
            node, place = found[index], part.start + index
            self.ranks[node], self.leads[node] = told.ranks[place], told.leads[place]
            self.chances[node] = told.chances[place]
        if local:
            self._rate()

    def _numbered(self, parents: Ints, tokens: Ints) -> Ints:
        """Of each the node that it is, or will be: new ones in order, those alike the same, `GONE` below none."""
        is_there = parents >= ROOT
        keys = np.concatenate([self.parents, parents[is_there]]) * TOKENS
        keys += np.concatenate([self.tokens, tokens[is_there]])
        nodes = np.arange(len(keys))
        in_order = np.sort(keys)
        if (in_order[1:] == in_order[:-1]).any():  # as a local node, or since a draft has forgotten its own
            first: dict[int, int] = {}
            for place, key in enumerate(keys.tolist()):
                nodes[place] = first.setdefault(key, len(first))
        found = np.full(len(parents), GONE, np.int64)
        found[is_there] = nodes[len(self) :]
        return found

    def _extend(self, places: Ints, tokens: Ints, told: Told, part: slice, is_new: Bools) -> None:
        """New nodes of the draft's."""
        above = places[is_new]
        if told.q:
            new = np.nonzero(is_new)[0] + part.start
            self._q |= {len(self) + place: told.q[node] for place, node in enumerate(new.tolist())}
        depths, reach = np.append(self.depths, 0)[above], np.append(self.reach, 1.0)[above]  # -1 finds the root's
        chances = told.chances[part][is_new]
        self._append_columns(
            (tokens[is_new], above, depths + 1, told.ranks[part][is_new]),
            (told.leads[part][is_new], chances, np.zeros(len(above)), reach * chances),
        )

    def _append_columns(self, ints: Sequence[Ints], floats: Sequence[Floats]) -> None:
        self._take_columns(
            np.concatenate([self._ints, np.stack(ints)], axis=1),
            np.concatenate([self._floats, np.stack(floats)], axis=1),
        )

    def guess(self, guesses: Guesses) -> None:
        """What a guesser proposes, until the next verdict. What is there already is the same node, whosever it is."""
        num_before, nodes = len(self), list[int]()
        new: dict[tuple[int, int], int] = {}
        depths: list[int] = []
        for parent, token in zip(guesses.parents, guesses.tokens, strict=True):
            place = parent if parent < num_before else nodes[parent - num_before]
            node = self.child(place, token) if place < num_before else None
            if node is None:
                node = new.setdefault((place, token), num_before + len(new))
                if node == num_before + len(depths):
                    depths.append(1 + self._depth(place, depths))
            nodes.append(node)
        if new:
            parents, tokens = np.array(list(new), np.int64).T
            zeros = np.zeros(len(new))
            ranks = np.full(len(new), UNRANKED)
            self._append_columns((tokens, parents, np.array(depths), ranks), (zeros, zeros, zeros, zeros))
            self._has_local = True
        np.maximum.at(self.guessed, nodes, guesses.chances)
        self._rate()

    def _depth(self, place: int, new_depths: Sequence[int]) -> int:
        if place == ROOT:
            return 0
        return int(self.depths[place]) if place < len(self) else new_depths[place - len(self)]

    def _rate(self) -> None:
        """Chances have changed."""
        reach = np.append(np.maximum(self.chances, self.guessed), 1.0)
        for above in self._ancestors():
            reach *= reach[above]
        self.reach[:] = reach[:-1]

    def _ancestors(self) -> Iterator[Ints]:
        """Of each node, and of the root behind them, the node 1, 2, 4, ... steps above, as far as any is not the root.

        The root, which is above itself, is where -1 finds it.
        """
        above = np.append(self.parents, ROOT)
        for _ in range(int(self.depths.max(initial=0)).bit_length()):
            yield above
            above = above[above]

    # Taking

    def best(self, num_nodes: int, max_depth: int, min_reach: float = 0.0) -> Ints:
        """The likeliest nodes, likeliest first: each comes after its parent, which is likelier."""
        fits = np.nonzero((self.reach >= min_reach) & (self.depths <= max_depth))[0]
        return fits[np.argsort(-self.reach[fits], kind="stable")[:num_nodes]]

    def first_chain(self, max_depth: int) -> Ints:
        """The draft's first candidate of the root, its first candidate of that, and so on: as far as it has told."""
        chain, end = list[int](), ROOT
        while len(chain) < max_depth:
            found = np.nonzero((self.parents == end) & (self.ranks == 0))[0]
            if not len(found):
                break
            chain.append(end := int(found[0]))
        return np.array(chain, np.int64)

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
        tokens, parents = self.tokens[nodes].tolist(), number[self.parents[nodes]].tolist()
        return TokenTree(tuple(tokens), tuple(parents), self._laws_of(nodes) if self._is_drawn else ())

    def _laws_of(self, nodes: Ints) -> tuple[SparseDistribution, ...]:
        """What each was drawn from; what was not drawn is sure of itself."""
        drawn, tokens = self._q, self.tokens
        return tuple(drawn.get(node) or SparseDistribution.certain(int(tokens[node])) for node in nodes.tolist())

    def open_reach(self, max_depth: int) -> Floats:
        """Of the places above `max_depth` that the draft feeds in its next passes, falling: that the text goes on there
        otherwise than the guessers say.
        """
        is_drafted = self.is_drafted
        is_fed = np.zeros(len(self) + 1, np.bool_)
        is_fed[self.parents[is_drafted]] = True
        left = np.append(self.reach, 1.0)
        np.subtract.at(left, self.parents[~is_drafted], self.reach[~is_drafted])
        is_above = np.append(self.depths, 0) < max_depth
        found = left[np.append(is_drafted, True) & is_above & ~is_fed]
        return np.sort(np.maximum(found, 0.0))[::-1]

    def outcomes(self, nodes: Ints) -> Ints:
        """Where the text may go on below a block of these nodes otherwise than by one of them, the likeliest first."""
        is_place = np.zeros(len(self) + 1, np.bool_)
        is_place[nodes] = is_place[ROOT] = True
        found = np.nonzero(is_place[self.parents] & ~is_place[:-1])[0]
        return found[np.argsort(-self.reach[found], kind="stable")]

    def nodes_of(self, block: TokenTree) -> Ints | None:
        """Where the nodes of this block are; None unless all are here."""
        found: list[int] = []
        for token, parent in zip(block.tokens, block.parents, strict=True):
            node = self.child(found[parent] if parent != ROOT else ROOT, token)
            if node is None:
                return None
            found.append(node)
        return np.array(found, np.int64)

    def branch(self, top: int) -> tuple[SpeculationTree, Ints]:
        """What has grown below `top`, as a tree of its own with `top` as its root; and which nodes those are."""
        nodes = np.nonzero(self._below(top))[0]
        place = np.full(len(self) + 1, GONE, np.int64)
        place[top], place[nodes] = ROOT, np.arange(len(nodes))
        branch = SpeculationTree()
        branch._take_columns(self._ints[:, nodes], self._floats[:, nodes])
        branch.parents[:] = place[branch.parents]
        branch.depths -= self.depths[top]
        branch.reach /= self.reach[top]
        return branch, nodes

    # Verdicts

    def children(self, parent: int) -> Ints:
        """Those that the draft has told of, in the order of their ranks."""
        found = np.nonzero((self.parents == parent) & self.is_drafted)[0]
        return found[np.argsort(self.ranks[found], kind="stable")]

    def child(self, parent: int, token: int) -> int | None:
        """The node below `parent` that is `token`."""
        found = np.nonzero((self.parents == parent) & (self.tokens == token))[0]
        return int(found[0]) if len(found) else None

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that these tokens lead down from the root, as far as there are any."""
        found: list[int] = []
        for token in tokens:
            node = self.child(found[-1] if found else ROOT, token)
            if node is None:
                break
            found.append(node)
        return found

    def reroot(self, tokens: Sequence[int]) -> bool:
        """These were committed, and the last of them is the root from now on; whether the tree knew them.

        What the draft told below it stays, what guessers proposed does not. A committed token has a place whether the
        draft has told of it or not: what it tells later hangs there.
        """
        path, num = self.path(tokens), len(tokens)
        moved = np.full(len(self) + 1, GONE, np.int64)
        moved[path] = ROOT - num + 1 + np.arange(len(path))
        is_known = len(path) == num
        kept = self._below(path[-1]) & self.is_drafted if is_known else np.zeros(len(self), np.bool_)
        moved[np.nonzero(kept)[0]] = np.arange(int(kept.sum()))
        self._move_numbers(moved, num)
        self._trail = np.concatenate([self._trail, np.array(tokens, np.int64)])[-MAX_TRAIL:]
        if is_known:
            self.reach /= self.reach[path[-1]]
            self.depths -= num
        self.has_lost_some |= self.num_told > MAX_NUMBERS
        self._keep(kept, moved)
        return is_known

    def _move_numbers(self, moved: Ints, num_committed: int) -> None:
        """Each node is where it was moved to, and each committed token is `num_committed` tokens further up."""
        places = self._numbers[1]
        places = np.where(places >= 0, moved[np.maximum(places, 0)], places - num_committed)
        self._numbers[1] = places
        self._numbers = self._numbers[:, places >= ROOT - MAX_TRAIL]

    def _below(self, top: int) -> Bools:
        """Which nodes grew below `top`."""
        is_below = np.zeros(len(self) + 1, np.bool_)
        is_below[top] = True
        for above in self._ancestors():
            is_below |= is_below[above]
        is_below[top] = False
        return is_below[:-1]

    def _keep(self, kept: Bools, moved: Ints) -> None:
        """Forget all other nodes; each is now where it was moved to."""
        was_guessed = self._has_local or bool(self.guessed.any())
        self._take_columns(self._ints[:, kept], self._floats[:, kept])
        self.parents[:] = moved[self.parents]
        self._has_local = False
        self._q.clear()
        if was_guessed:
            self.guessed[:] = 0.0
            self._rate()
