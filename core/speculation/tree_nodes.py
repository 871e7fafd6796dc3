"""Nodes of a draft tree, and parts of the tree as a policy sees them.

Knows tokens and chances; a `Part` shows shape and chances without the tokens.
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
    """A token that may follow its parent, or that has followed it."""

    token: int
    numbers: tuple[int, ...] = ()
    """Numbers that the draft has given the node: none or one, or more if the draft has sent it again."""
    rank: int = UNRANKED
    """Rank among the draft's candidates; `UNRANKED` if the draft has not sent the node (a local node)."""
    chance: float = 0.0
    """The draft's chance that the text continues with the node, given its parent; 0 for local nodes."""
    confidence: float = 0.0
    """Confidence of the draft at the parent."""
    q: SparseDistribution = NO_Q
    """The distribution it was drawn from, if the draft samples."""
    children: dict[int, Node] = field(default_factory=dict)
    """Children that have been read, by token, in the order in which they came."""
    guessed: float = 0.0
    """Like `chance`, by the guessers, for the current root; 0 if no guesser proposes the node."""
    source: str = ""
    """The source that gave `guessed`."""
    is_above_root: bool = False
    """Whether the node precedes the root: a token after it has been committed."""

    def take_over(self, new_nodes: NewNodes, index: int) -> None:
        """Take over the draft's data of the node with this index in the message."""
        self.rank = new_nodes.ranks.item(index)
        self.chance = new_nodes.chances.item(index)
        self.confidence = new_nodes.confidences.item(index)
        self.q = new_nodes.q[index] if new_nodes.q else NO_Q

    @property
    def is_drafted(self) -> bool:
        return self.rank != UNRANKED

    @property
    def is_from_further_draft(self) -> bool:
        """Whether a further draft gives it a larger chance than the first draft does."""
        return self.guessed > self.chance and self.source.startswith(EXTRA_DRAFT)

    @property
    def best_chance(self) -> float:
        """The largest chance that a source gives it, given its parent."""
        return max(self.chance, self.guessed)


class Part:
    """Nodes of a tree, parents first, as a policy sees them: without their tokens."""

    __slots__ = ("_nodes", "parents", "path_prob")

    def __init__(
        self, nodes: Sequence[Node] = (), path_prob: Sequence[float] | Floats = (), parents: Sequence[int] = ()
    ) -> None:
        self._nodes = tuple(nodes)
        self.path_prob: Floats = np.array(path_prob, np.float64)
        """Path probability of each node; never above its parent's."""
        self.parents = tuple(parents)
        """Index of each node's parent; `ROOT` for children of the root."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def confidences(self) -> tuple[float, ...]:
        """Confidence of the draft at each node's parent."""
        return tuple([node.confidence for node in self._nodes])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among the draft's candidates, or `UNRANKED`."""
        return tuple([node.rank for node in self._nodes])

    @property
    def sources(self) -> tuple[str, ...]:
        """Source of each node: the draft, a further draft that gives it a larger chance, or the guesser with the
        largest."""
        return tuple(
            [DRAFT if node.is_drafted and not node.is_from_further_draft else node.source for node in self._nodes]
        )

    @property
    def depth(self) -> int:
        """Length of the longest chain."""
        return max(depths(self.parents), default=0)

    def head(self, num_nodes: int) -> Part:
        """The first `num_nodes` nodes."""
        return Part(self._nodes[:num_nodes], self.path_prob[:num_nodes], self.parents[:num_nodes])

    def take(self, indices: Sequence[int]) -> Part:
        """The nodes at these indices."""
        new = {old: index for index, old in enumerate(indices)}
        parents = [new.get(self.parents[index], ROOT) for index in indices]
        return Part([self._nodes[index] for index in indices], self.path_prob[list(indices)], parents)

    def drafted(self) -> Part:
        """The nodes that the draft has sent."""
        return self.take([index for index, node in enumerate(self._nodes) if node.is_drafted])

    def straight(self) -> Part:
        """The chain of first children, from the root down."""
        indices, end = list[int](), ROOT
        for index, parent in enumerate(self.parents):
            if parent == end:
                indices.append(end := index)
        return self.take(indices)

    def branches(self) -> Ints:
        """Number of branches among the nodes up to each one: children after their parent's first.  # [N]"""
        first: dict[int, int] = {}
        is_later = [first.setdefault(parent, index) != index for index, parent in enumerate(self.parents)]
        return np.cumsum(is_later, dtype=np.int64)

    def with_below(self, end: int, part: Part) -> Part:
        """These nodes, followed by those of `part`, whose root is the node at `end`."""
        size = len(self)
        parents = [end if parent == ROOT else size + parent for parent in part.parents]
        return Part(self._nodes + part._nodes, [*self.path_prob, *part.path_prob], self.parents + tuple(parents))


EMPTY_PART = Part()
