"""How a draft is to grow a tree of guesses, what it tells of the growth, and what of that nobody has looked at.

Knows the order to grow and the nodes that follow from it; must not know which of them are verified.
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
"""Rank of a guess that is not the draft's."""


class Measure(StrEnum):
    """Of how sure a draft is at a place, in [0, 1]."""

    MARGIN = "margin"
    """How clearly its first candidate wins (`core.speculation.candidates.Candidates.margin`)."""
    CONFIDENCE = "confidence"
    """The share of its first candidate, the noise that it shares with the target included."""
    ENTROPY = "entropy"
    """e to the minus entropy of q: 1 over the number of tokens that it is torn between."""


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """How a draft is to grow, pass after pass, until it hears otherwise; it tells what has grown after each pass.

    Where the draft samples it grows draws, a chain or a tree as its rule takes them, and ends by itself: what is drawn
    is of use for one block. `fanout` tokens are drawn at each place.
    """

    rows_per_pass: int
    """Nodes that are fed in one pass at most, over all sessions in it; of this one, where growth ends by itself."""
    max_depth: int
    """Below the last committed token."""
    min_path_prob: float = 0.0
    """Nodes that the text reaches with less than this chance are not fed. Growth that ends by itself does so when those
    of a pass, summed, have less."""
    calibration: tuple[float, float] = (0.0, 1.0)
    """a and b: log odds that the target's token is the first candidate, a + b times the log odds of its margin."""
    tail: tuple[float, ...] = ()
    """If it is not the first: the chances of the second, the third, and so on."""
    reports_all: bool = False
    """Whether all that has grown is to be told once more, with numbers from 0."""
    num_passes: int = 0
    """Number of passes after which growth ends by itself and is the reply to its request (drafting in turn). 0: it
    continues."""
    fanout: int = 8
    """Candidates of a place that become nodes at most; with 1 a chain grows."""
    measure: Measure = Measure.MARGIN
    """Of how sure the draft is at a place, as it is told."""
    min_confidence: float = 0.0
    """By that measure: nothing grows at a place where the draft is less sure."""

    @classmethod
    def chain(cls, num_tokens: int, measure: Measure = Measure.MARGIN) -> TreeSpec:
        """The first candidates in a row, or the draws, and then an end; however unsure the draft is of them."""
        return cls(1, num_tokens, calibration=(5.0, 0.0), num_passes=num_tokens, fanout=1, measure=measure)

    @property
    def ends(self) -> bool:
        """Whether growth ends by itself, with a reply of its own."""
        return self.num_passes > 0

    @property
    def is_blind(self) -> bool:
        """Whether what grows, and for how long, does not depend on what the draft says: the shape is fixed before."""
        is_cut = self.min_path_prob > 0.0 or self.min_confidence > 0.0
        return self.ends and self.calibration[1] == 0.0 and not is_cut and all(map(ge, self.tail, self.tail[1:]))

    @property
    def is_chain(self) -> bool:
        """Whether what grows is the chain of this length, and nothing else."""
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
"""Of what a draft tells. An array keeps the size of its numbers: 32 bits where it came over a link."""


@dataclass(frozen=True, slots=True, init=False, eq=False)
class NewNodes:
    """Nodes that a draft has grown, with numbers of its own: one after the other, parents first."""

    first: int
    """Number of the first node."""
    parents: Ints
    """Numbers; `ROOT` for the last committed token of the message that is answered."""
    tokens: Ints
    ranks: Ints
    chances: Floats
    """That the text goes on with the node, if it gets to its parent."""
    confidences: Floats
    """How sure the draft was at the node's place, by the measure that was asked for."""
    root: int
    """Number that the last committed token has, if it was a node before; else `ROOT`."""
    q: tuple[SparseDistribution, ...]
    """What each was drawn from, where the draft samples; else none."""
    is_checked: bool = field(init=False)
    """Whether they were found to be what they should be; what a draft has grown of its own, nobody has looked at."""

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
        """`is_own`: who makes this has grown the nodes, and whoever is told of them checks them.

        Raises: ValueError when they are not what they should be.
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
        """What was unpickled has not been. Raises: ValueError when they are not what they should be."""
        shape = (len(self.tokens),)
        for name, kind in COLUMNS.items():
            column = getattr(self, name)
            if column.shape != shape or column.dtype.kind != kind.kind:
                raise ValueError("each node needs a parent, a rank, a chance and a confidence, all numbers")
        if len(self):
            self._check_nodes()
        if len(self.q) not in (0, len(self)) or not all(each.is_law for each in self.q):
            raise ValueError("each drawn node needs the q that it was drawn from")
        if self.first < 0 or not ROOT <= self.root < self.first:
            raise ValueError("the number of a node is below 0")

    def _check_nodes(self) -> None:
        least, most = np.minimum.reduce, np.maximum.reduce  # what is no number is neither
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


Told = tuple[NewNodes, list[int]]
"""What a draft has told in one message, and the parents of its nodes once more."""
ByParent = dict[int, tuple[Told, ...]]
"""By the number of a parent: where its children were told."""


class Unread:
    """What a draft has told of one tree and nobody has looked at, as it came: most never is, so nothing is done for
    each node. Some of it no verdict can lead to any more.
    """

    def __init__(self, max_depth: int) -> None:
        """`max_depth`: of what the draft grows below the last token that it knows."""
        self._max_depth = max_depth
        self.clear()

    def clear(self) -> None:
        """Forget all of it."""
        self.halves: tuple[ByParent, ByParent] = {}, {}
        """Earlier and later. The earlier half is forgotten when `max_depth` tokens have been committed since its end,
        without a search for what is dead."""
        self._num_passed = 0
        """Tokens that were committed since the later half was begun."""

    def add(self, new_nodes: NewNodes, parents: list[int]) -> KeysView[int]:
        """One message, but for what hangs below the root; returns the numbers of the parents."""
        told: ByParent = dict.fromkeys(parents, ((new_nodes, parents),))
        told.pop(ROOT, None)
        later = self.halves[1]
        for parent in told.keys() & later.keys():
            told[parent] = later[parent] + told[parent]
        later.update(told)
        return told.keys()

    def take(self, numbers: Iterable[int]) -> list[tuple[int, NewNodes, int]]:
        """What was told of the children of these: the number of each, the message, and the place there; by number."""
        told = [
            (new_nodes.first + place, new_nodes, place)
            for half in self.halves
            for parent in numbers
            for new_nodes, parents in half.pop(parent, ())
            for place in places_of(parents, parent)
        ]
        told.sort()  # each number is told once
        return told

    def passed(self, num_tokens: int) -> None:
        """More tokens were committed."""
        self._num_passed += num_tokens
        if self._num_passed >= self._max_depth:  # nothing that was told before it can follow any more
            self.halves, self._num_passed = (self.halves[1], {}), 0


def places_of(parents: list[int], parent: int) -> Iterator[int]:
    """Of its children, which are most often one behind the other."""
    place = -1
    for _ in range(parents.count(parent)):
        place = parents.index(parent, place + 1)
        yield place
