"""How a draft grows a tree by its own judgement: in each pass it feeds what is likeliest to be needed.

Knows tokens, chances and the order of work; must not know models, KV or time. A plan made beforehand (`core.growth`)
knows how often a second candidate is right; the draft knows whether it is sure at this place. So rows that a plan would
spend on alternatives to a sure guess go where there is doubt. The order is best first: a node is worth the chance that
the text reaches it, and is never likelier than its parent. Source: the dynamic trees of EAGLE-2 (Li et al. 2024, arXiv
2406.16858), here for all outcomes of a verification at once, and with the shared noise in the confidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from core.estimators import MAX_CHANCE, logistic, logit
from core.growth import Candidates, Grown, Sprout
from core.records import DraftRequest
from core.trees import ROOT, Budget, Growth

MIN_CHANCE = 2e-4
"""What is less likely is not worth its place in a message."""
UNKNOWN_LEAD = 0.5
"""Where the draft has not been yet."""
ITSELF = -1
"""In place of a rank: the place is to be fed, not a guess after it."""
PLACE = -1
"""Level of the block's nodes and, below a table, of the root: where outcomes hang."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What may follow one node."""

    candidates: Candidates
    head: float
    """Chance of the first candidate, if the text gets to the node."""
    tail: Sequence[float]
    """Chances of the others, if it is not the first."""
    free: Sequence[int]
    """Places, among the candidates, of those that the block does not guess there."""


class BudgetSprout:
    """One tree in the making; `core.growth.Sprout` says how it is used. It never samples."""

    def __init__(self, request: DraftRequest, budget: Budget, known: Mapping[int, Candidates]) -> None:
        block = request.block
        self._budget = budget
        self._weights = [math.sqrt(chance) for chance in budget.tail]
        self._num_block = len(block)
        self._parents = list(block.parents)
        self._depths = list(block.depths)
        self._levels = [PLACE] * len(block)
        self._root_level = PLACE if request.is_table else 0
        self._ranks: list[int] = []
        self._said: dict[int, _Said] = {}
        self._open: list[tuple[float, int, int, int]] = []
        """What may be fed, likeliest first: (-chance, order, parent, rank), or (-chance, order, place, `ITSELF`)."""
        self._order = count()
        self._is_full = False
        self._is_begun = False
        """Of the present pass a part has been made."""
        self._taken: dict[int, set[int]] = {}
        for parent, token in zip(block.parents, block.tokens, strict=True):
            self._taken.setdefault(parent, set()).add(token)
        self.tokens = list(block.tokens)
        self.num_passes = 0
        self._reach = self._reach_of_block(known)
        self._chosen: list[int] = []
        for place in (ROOT, *range(len(block))):
            if place in known:
                self._expand(place, known[place])
            else:
                heappush(self._open, (-self._chance(place), next(self._order), place, ITSELF))
        self._choose()

    def __repr__(self) -> str:
        return f"<BudgetSprout {len(self.tokens)} nodes, {self.num_passes} of {self._budget.num_passes} passes>"

    @property
    def is_done(self) -> bool:
        return not self.frontier()

    def frontier(self) -> list[int]:
        """Nodes to feed in the next pass, parents first; ROOT stands for what is left of the suffix."""
        if self.num_passes >= self._budget.num_passes:
            return []
        if not self._is_full:
            self._choose()
        return self._chosen if self._pays() else []

    def take(self, found: Mapping[int, Candidates]) -> None:
        """What the model says after each node of the frontier, or of a first part of it."""
        self.num_passes += 1
        self._chosen = [node for node in self._chosen if node not in found]
        self._is_begun = bool(self._chosen)
        for node, candidates in found.items():
            self._expand(node, candidates)

    def drop(self, nodes: Iterable[int]) -> None:
        """There is no room to feed these nodes, nor any more."""
        dropped = set(nodes)
        if dropped:
            self._is_full = True
            self._chosen = [node for node in self._chosen if node not in dropped]

    def depth(self, node: int) -> int:
        """Distance from the root."""
        return 0 if node == ROOT else self._depths[node]

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def place(self, node: int) -> int | None:  # noqa: ARG002  as Sprout.place
        """Nothing is sampled."""
        return None

    def grown(self) -> Grown:
        """The likeliest nodes, likeliest first, so that a prefix of any block is the best of its size."""
        self._add_leaves()
        nodes = sorted(range(self._num_block, len(self.tokens)), key=lambda node: -self._reach[node])
        nodes = self._answering(nodes[: self._budget.num_nodes])
        number = {node: index for index, node in enumerate(nodes, start=self._num_block)}
        parents = tuple(number.get(self._parents[node], self._parents[node]) for node in nodes)
        said = [self._said[self._parents[node]].candidates for node in nodes]
        return Grown(
            tokens=tuple(self.tokens[node] for node in nodes),
            confidence=tuple(each.lead for each in said),
            entropy=tuple(each.entropy for each in said),
            growth=Growth(parents, tuple(self._ranks[node - self._num_block] for node in nodes)),
        )

    # Chances

    def _reach_of_block(self, known: Mapping[int, Candidates]) -> list[float]:
        """Chance of each node of the block to be accepted."""
        reach: list[float] = []
        for parent, token in zip(self._parents, self.tokens, strict=True):
            above, candidates = 1.0 if parent == ROOT else reach[parent], known.get(parent)
            if candidates is None:
                chance = self._head(UNKNOWN_LEAD)
            elif token in candidates.ranked:
                head, tail = self._head(candidates.lead), self._tail(candidates)
                chance = _chance_at(candidates.ranked.index(token), head, tail)
            else:
                chance = 0.0
            reach.append(above * max(chance, MIN_CHANCE))
        return reach

    def _pays(self) -> bool:
        """Whether a pass for what is chosen may be expected to gain enough.

        Without the root there would be no guess; and a pass of which a part was made is made whole.
        """
        if self._is_begun or ROOT in self._chosen or self._budget.min_reach == 0.0:
            return True
        return sum(map(self._chance, self._chosen)) >= self._budget.min_reach

    def _head(self, lead: float) -> float:
        """Chance that the first candidate is the target's token."""
        intercept, slope = self._budget.sureness
        return min(logistic(intercept + slope * logit(lead)), MAX_CHANCE)  # no surer than the fit that tells the two

    def _tail(self, candidates: Candidates) -> Sequence[float]:
        """Chances of the second candidate, the third, and so on, if it is not the first.

        As likely together as they are on the whole; each by its share here and the root of what is usual at its rank,
        which foretells the demo target's token well, greedy and sampled (docs/adr/0010).
        """
        weights = [weight * share for weight, share in zip(self._weights, candidates.shares[1:], strict=False)]
        total = sum(weights)
        if not total:
            return self._budget.tail
        scale = sum(self._budget.tail) / total
        return [weight * scale for weight in weights]

    # Growing

    def _expand(self, node: int, candidates: Candidates) -> None:
        """The likeliest child of `node` is open from now on; each of the others when the one before it is taken."""
        taken, num_ranked = self._taken.get(node), len(candidates.ranked)
        free: Sequence[int] = range(num_ranked)
        if taken:
            free = [place for place in free if candidates.ranked[place] not in taken]
        self._said[node] = _Said(candidates, self._head(candidates.lead), self._tail(candidates), free)
        if self._level(node) < self._budget.max_depth:
            self._offer(node, 0)

    def _offer(self, parent: int, rank: int) -> None:
        """Best first is best because siblings come in the order of their chances."""
        said = self._said[parent]
        fanout = 1 if self._budget.is_chain and self._level(parent) != PLACE else self._budget.fanout
        if rank < min(len(said.free), fanout):
            chance = self._chance(parent) * _chance_at(said.free[rank], said.head, said.tail)
            if chance >= MIN_CHANCE:
                heappush(self._open, (-chance, next(self._order), parent, rank))

    def _choose(self) -> None:
        """Fill the next pass with the likeliest of what is open; leaves at full depth are grown but not fed."""
        while self._open and len(self._chosen) < self._budget.rows_per_pass:
            is_place = self._open[0][3] == ITSELF
            node = heappop(self._open)[2] if is_place else self._grow_one()
            if self._level(node) < self._budget.max_depth:
                self._chosen.append(node)

    def _grow_one(self) -> int:
        chance, _, parent, rank = heappop(self._open)
        node = len(self.tokens)
        said = self._said[parent]
        self.tokens.append(said.candidates.ranked[said.free[rank]])
        self._parents.append(parent)
        self._ranks.append(rank)
        self._reach.append(-chance)
        self._depths.append(self.depth(parent) + 1)
        self._levels.append(self._level(parent) + 1)
        self._offer(parent, rank + 1)
        return node

    def _chance(self, node: int) -> float:
        """That the text gets to `node`."""
        return 1.0 if node == ROOT else self._reach[node]

    def _level(self, node: int) -> int:
        """Distance from the outcome above: 0 for outcomes themselves, `PLACE` for what they hang below."""
        return self._root_level if node == ROOT else self._levels[node]

    def _add_leaves(self) -> None:
        """What is open and likelier than what there is; an outcome without a block would answer nothing."""
        fed = sorted(self._reach[self._num_block :], reverse=True)
        self._open = [guess for guess in self._open if self._level(guess[2]) != PLACE and guess[3] != ITSELF]
        heapify(self._open)
        for place in reversed(range(self._budget.num_nodes)):
            if not self._open or (place < len(fed) and fed[place] >= -self._open[0][0]):
                break
            self._grow_one()

    def _answering(self, nodes: Sequence[int]) -> list[int]:
        """Without the outcomes below which nothing has grown."""
        has_children = {self._parents[node] for node in nodes}
        return [node for node in nodes if self._levels[node] != 0 or node in has_children]


def _chance_at(place: int, head: float, tail: Sequence[float]) -> float:
    """Of one candidate. `head` is that of the first, `tail` those of the others if it is not the first; none of them
    is likelier than the first, whatever the two estimates say."""
    if place == 0:
        return head
    return min((1.0 - head) * tail[place - 1], head) if place <= len(tail) else 0.0


AnySprout = Sprout | BudgetSprout


def sprout_of(request: DraftRequest, samples: bool, known: Mapping[int, Candidates]) -> AnySprout:
    """The tree that `request` asks for."""
    if isinstance(request.growth, Budget):
        return BudgetSprout(request, request.growth, known)
    return Sprout(request, samples, known)
