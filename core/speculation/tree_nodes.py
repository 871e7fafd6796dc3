"""Nodes of a draft tree, and parts of it as a policy sees them.

Knows tokens and chances; a `Part` shows its shape without the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.speculation.growth import UNRANKED, Floats, Ints, NewNodes
from core.speculation.guesser import DRAFT, EXTRA_DRAFT
from core.speculation.token_tree import NO_Q, ROOT, SparseDistribution, depths


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Node:
    """A token that may follow its parent, or has followed it."""

    token: int
    numbers: tuple[int, ...] = ()
    """That the draft has for it: one, or none, but where it has told of it twice."""
    rank: int = UNRANKED
    """Among the draft's candidates; `UNRANKED` while the draft has not told of the node: then it is local."""
    chance: float = 0.0
    """By the draft, that the text goes on with the node, if it gets to its parent; 0 for local nodes."""
    confidence: float = 0.0
    """How sure the draft was at the parent."""
    q: SparseDistribution = NO_Q
    """What it was drawn from, where the draft samples."""
    children: dict[int, Node] = field(default_factory=dict)
    """Those that have been looked at, by token, in the order in which they came."""
    guessed: float = 0.0
    """The same as `chance` by the guessers, for this root; 0 where none guesses the node."""
    source: str = ""
    """The guesser that gave this chance."""
    is_passed: bool = False
    """Whether another token has been committed behind it."""

    def tell(self, new_nodes: NewNodes, place: int) -> None:
        """The draft tells of it, at this place of a message."""
        self.rank = new_nodes.ranks.item(place)
        self.chance = new_nodes.chances.item(place)
        self.confidence = new_nodes.confidences.item(place)
        self.q = new_nodes.q[place] if new_nodes.q else NO_Q

    @property
    def is_drafted(self) -> bool:
        return self.rank != UNRANKED

    @property
    def is_anothers(self) -> bool:
        """Whether a further draft thinks it likelier than the first does."""
        return self.guessed > self.chance and self.source.startswith(EXTRA_DRAFT)

    @property
    def likely(self) -> float:
        """That the text goes on with it, if it gets to its parent."""
        return max(self.chance, self.guessed)


class Part:
    """Nodes of a tree, parents first, as a policy sees them: it must not know tokens."""

    __slots__ = ("_nodes", "parents", "path_prob")

    def __init__(
        self, nodes: Sequence[Node] = (), path_prob: Sequence[float] | Floats = (), parents: Sequence[int] = ()
    ) -> None:
        self._nodes = tuple(nodes)
        self.path_prob: Floats = np.array(path_prob, np.float64)
        """Chance that the text gets to each node. Not above its parent's."""
        self.parents = tuple(parents)
        """Which of the nodes is the parent of each; `ROOT` where none is."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def confidences(self) -> tuple[float, ...]:
        """How sure the draft was at the parent of each."""
        return tuple([node.confidence for node in self._nodes])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of each among the draft's candidates, or `UNRANKED`."""
        return tuple([node.rank for node in self._nodes])

    @property
    def sources(self) -> tuple[str, ...]:
        """Of each the draft, another draft that thinks it likelier, or the guesser that is surest of it."""
        return tuple([DRAFT if node.is_drafted and not node.is_anothers else node.source for node in self._nodes])

    @property
    def depth(self) -> int:
        """Nodes in a row, at most."""
        return max(depths(self.parents), default=0)

    def head(self, num_nodes: int) -> Part:
        """The first of them."""
        return Part(self._nodes[:num_nodes], self.path_prob[:num_nodes], self.parents[:num_nodes])

    def take(self, places: Sequence[int]) -> Part:
        """Those at these places."""
        new = {place: index for index, place in enumerate(places)}
        parents = [new.get(self.parents[place], ROOT) for place in places]
        return Part([self._nodes[place] for place in places], self.path_prob[list(places)], parents)

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

    def with_below(self, end: int, part: Part) -> Part:
        """These, and behind them those of `part`, whose root is the node at `end`."""
        size = len(self)
        parents = [end if parent == ROOT else size + parent for parent in part.parents]
        return Part(self._nodes + part._nodes, [*self.path_prob, *part.path_prob], self.parents + tuple(parents))


EMPTY_PART = Part()
