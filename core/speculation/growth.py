"""The specification of a draft's tree (`TreeSpec`), and its nodes as sent and stored (`NewNodes`, `UnreadNodes`).

Knows the specification and the resulting nodes; must not know which of them are verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import ge
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from core.speculation.token_tree import ROOT, SparseDistribution

UNRANKED = -1
"""Rank of a guess that does not come from the draft."""


class Measure(StrEnum):
    """How a draft's confidence after a node is measured, in [0, 1]."""

    MARGIN = "margin"
    """How clearly the first candidate wins (`core.speculation.candidates.Candidates.margin`)."""
    CONFIDENCE = "confidence"
    """Share of the first candidate, with the noise where draft and target share it."""
    ENTROPY = "entropy"
    """e to the minus entropy of q: 1 over the effective number of tokens."""


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """How a draft grows its tree, pass after pass, until the next message. The draft sends the new nodes of each pass.

    If the rule needs q, the draft grows draws, as a chain or a tree, and growth ends by itself, because draws are
    usable for one block only. `fanout` tokens are then drawn after each node.
    """

    rows_per_pass: int
    """Largest number of nodes fed in one pass, over all sessions in it; over this session if growth ends by itself."""
    max_depth: int
    """Largest depth of a node below the last committed token."""
    min_path_prob: float = 0.0
    """Nodes with a smaller path probability are not fed. Growth that ends by itself ends when the path probabilities of
    a pass sum to less."""
    calibration: tuple[float, float] = (0.0, 1.0)
    """(a, b): the log odds that the first candidate is right are a + b times the log odds of its margin."""
    tail: tuple[float, ...] = ()
    """Chances of the second candidate, the third, ..., if the first is wrong."""
    reports_all: bool = False
    """Whether the draft sends all its nodes again, numbered from 0."""
    num_passes: int = 0
    """Number of passes after which growth ends by itself and answers its request (drafting in turn). 0: it continues
    until the next message."""
    fanout: int = 8
    """Largest number of candidates of a node that become children; 1 grows a chain."""
    measure: Measure = Measure.MARGIN
    """Measure of the confidences that the draft sends."""
    min_confidence: float = 0.0
    """A node whose confidence, by `measure`, is lower gets no children."""

    @classmethod
    def chain(cls, num_tokens: int, measure: Measure = Measure.MARGIN) -> TreeSpec:
        """A chain of the first candidates, or of draws, of exactly this length, whatever the draft's confidence."""
        return cls(1, num_tokens, calibration=(5.0, 0.0), num_passes=num_tokens, fanout=1, measure=measure)

    @property
    def ends(self) -> bool:
        """Whether growth ends by itself, with its own reply."""
        return self.num_passes > 0

    @property
    def is_blind(self) -> bool:
        """Whether the shape and length of the tree are fixed beforehand, independent of the draft's output."""
        is_cut = self.min_path_prob > 0.0 or self.min_confidence > 0.0
        return self.ends and self.calibration[1] == 0.0 and not is_cut and all(map(ge, self.tail, self.tail[1:]))

    @property
    def is_chain(self) -> bool:
        """Whether the spec equals `TreeSpec.chain` of this length."""
        return self == replace(TreeSpec.chain(self.num_passes or 1, self.measure), reports_all=self.reports_all)

    def __post_init__(self) -> None:
        if min(self.rows_per_pass, self.max_depth, self.fanout) < 1 or self.num_passes < 0:
            raise ValueError("a tree spec needs room for a node")
        if not (math.isfinite(self.min_path_prob) and self.min_path_prob >= 0.0 and 0.0 <= self.min_confidence <= 1.0):
            raise ValueError("the bounds of a tree spec are not probabilities")
        if (
            not all(map(math.isfinite, self.calibration))
            or sum(self.tail) > 1.0 + 1e-6
            or any(x < 0 for x in self.tail)
        ):
            raise ValueError("the chances of a tree spec are not probabilities")


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
COLUMNS: Mapping[str, np.dtype[Any]] = {
    "parents": np.dtype(np.int64),
    "tokens": np.dtype(np.int64),
    "ranks": np.dtype(np.int64),
    "chances": np.dtype(np.float64),
    "confidences": np.dtype(np.float64),
}
"""Columns of `NewNodes`. An array keeps its item size: 32 bits if it came over a link."""


@dataclass(frozen=True, slots=True, init=False, eq=False)
class NewNodes:
    """Nodes that a draft has grown, with the draft's numbering: consecutive, parents first."""

    first: int
    """Number of the first node."""
    parents: Ints
    """Number of each node's parent; `ROOT` for the last committed token of the message that is answered."""
    tokens: Ints
    ranks: Ints
    chances: Floats
    """Chance that the text continues with the node, given its parent."""
    confidences: Floats
    """Confidence of the draft at the node's parent, by the requested measure."""
    root: int
    """Number of the last committed token, if it was a node before; else `ROOT`."""
    q: tuple[SparseDistribution, ...]
    """The distribution each node was drawn from, if the draft samples; else empty."""
    is_checked: bool = field(init=False)
    """Whether the nodes were validated. A draft does not validate its own nodes."""

    def __init__(
        self,
        first: int,
        parents: ArrayLike = (),
        tokens: ArrayLike = (),
        ranks: ArrayLike = (),
        chances: ArrayLike = (),
        confidences: ArrayLike = (),
        root: int = ROOT,
        q: Sequence[SparseDistribution] = (),
        *,
        is_own: bool = False,
    ) -> None:
        """`is_own`: whether the caller has grown the nodes itself. They are then not validated here.

        Raises: ValueError if they are invalid.
        """
        columns = (parents, tokens, ranks, chances, confidences)
        for (name, kind), column in zip(COLUMNS.items(), columns, strict=True):
            object.__setattr__(self, name, column if isinstance(column, np.ndarray) else np.asarray(column, kind))
        object.__setattr__(self, "first", first)
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "q", tuple(q))
        object.__setattr__(self, "is_checked", not is_own)
        if not is_own:
            self.check()

    def check(self) -> None:
        """Validate the nodes; unpickling does not. Raises: ValueError if they are invalid."""
        shape = (len(self.tokens),)
        for name, kind in COLUMNS.items():
            column = getattr(self, name)
            if column.shape != shape or column.dtype.kind != kind.kind:
                raise ValueError("each node needs a parent, a rank, a chance and a confidence, all numbers")
        if len(self):
            self._check_nodes()
        if len(self.q) not in (0, len(self)) or not all(each.is_valid for each in self.q):
            raise ValueError("each drawn node needs the q that it was drawn from")
        if self.first < 0 or not ROOT <= self.root < self.first:
            raise ValueError("the number of a node is below 0")

    def _check_nodes(self) -> None:
        least, most = np.minimum.reduce, np.maximum.reduce  # NaN fails both comparisons
        if not (least(self.chances) > 0.0 and most(self.chances) <= 1.0):
            raise ValueError("the chance of a node is not in (0, 1]")
        if not (least(self.confidences) >= 0.0 and most(self.confidences) <= 1.0):
            raise ValueError("the confidence of a node is not in [0, 1]")
        if least(self.parents) < ROOT or most(self.parents - np.arange(len(self))) >= self.first:
            raise ValueError("a node comes before its parent")
        if least(self.ranks) < 0:
            raise ValueError("the rank of a node is below 0")

    def are_within(self, vocab_size: int) -> bool:
        """Whether all tokens are in the vocabulary."""
        return not len(self) or 0 <= np.minimum.reduce(self.tokens) <= np.maximum.reduce(self.tokens) < vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NewNodes):
            return NotImplemented
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS)
        return (self.first, self.root, self.q) == (other.first, other.root, other.q) and all(same)

    def __hash__(self) -> int:
        return hash((self.first, self.root, len(self)))


NodeMessage = tuple[NewNodes, list[int]]
"""One message of new nodes, and the parents of its nodes as a list."""
ByParent = dict[int, tuple[NodeMessage, ...]]
"""Messages that have children of a node, by the node's number."""


class UnreadNodes:
    """Nodes received from a draft but not read yet, by message.

    Most nodes are never read, so storing a message does no work per node. Nodes that no verdict can reach any more may
    be among them.
    """

    def __init__(self, max_depth: int) -> None:
        """`max_depth`: largest depth that the draft grows below the last token it knows."""
        self._max_depth = max_depth
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.generations: tuple[ByParent, ByParent] = {}, {}
        """Earlier and later messages. The earlier are dropped once `max_depth` tokens have been committed since the
        later began, so that no search for unreachable nodes is needed."""
        self._num_committed = 0
        """Number of tokens committed since the later generation began."""

    def add(self, new_nodes: NewNodes, parents: list[int]) -> KeysView[int]:
        """Store one message, except for the root's children. Return the numbers of the parents in it."""
        added: ByParent = dict.fromkeys(parents, ((new_nodes, parents),))
        added.pop(ROOT, None)
        later = self.generations[1]
        for parent in added.keys() & later.keys():
            added[parent] = later[parent] + added[parent]
        later.update(added)
        return added.keys()

    def take(self, numbers: Iterable[int]) -> list[tuple[int, NewNodes, int]]:
        """Remove and return the children of these nodes, sorted by number: (number, message, index in the message)."""
        children = [
            (new_nodes.first + index, new_nodes, index)
            for generation in self.generations
            for parent in numbers
            for new_nodes, parents in generation.pop(parent, ())
            for index in indices_of(parents, parent)
        ]
        children.sort()  # numbers are unique, so messages are never compared
        return children

    def commit(self, num_tokens: int) -> None:
        """Record that `num_tokens` more tokens were committed."""
        self._num_committed += num_tokens
        if self._num_committed >= self._max_depth:  # no node of the earlier generation can be reached any more
            self.generations, self._num_committed = (self.generations[1], {}), 0


def indices_of(parents: list[int], parent: int) -> Iterator[int]:
    """Indices of the children of `parent`, which are most often consecutive."""
    index = -1
    for _ in range(parents.count(parent)):
        index = parents.index(parent, index + 1)
        yield index
