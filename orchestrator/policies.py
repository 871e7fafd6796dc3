"""The named policies: simple rules, for those who want them and to compare with.

Knows shapes and settings; must not know tokens.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from itertools import accumulate, takewhile

from core.config import SpeculationConfig
from core.estimators import miss_curve
from core.records import GenerationRequest, StopRule
from core.shapes import RankLaw
from core.tables import TableBudget
from core.trees import NO_GROWTH, Budget, Growth
from orchestrator.knowledge import Doing, Knowledge
from orchestrator.pilot import RoundSeen, Shape, Source
from orchestrator.watching import WatchingPilot

UNBOUNDED = 1 << 30
MAX_FANOUT = 32
"""Candidates of a place that are looked at; the draft keeps no more."""
FIRST_GAMMA = 4
"""Where the heuristic begins."""
USUAL_TAIL = tuple(miss_curve(rank - 1) - miss_curve(rank) for rank in range(1, 32))
"""Chances of the second candidate, the third, and so on, if it is not the first: the demo pair's, never learned."""


class StaticPilot(WatchingPilot):
    """Always gamma guesses in a row, and a table of the same fan-out wherever a block may end."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._first_law: RankLaw = knowledge.prior_law(self.kind, is_sampled=self._is_sampled)
        if self._max_depth:
            knowledge.begin(self._doing, f"{self.kind}: gamma {self.gamma}, {self.rule}")

    @property
    def gamma(self) -> int:
        """Guesses in a row at present."""
        return self._max_depth

    @property
    def rule(self) -> str:
        """Why, for people."""
        return f"always {self._max_depth}"

    @property
    def _doing(self) -> Doing:
        return Doing(self.gamma, self.gamma, self._max_table_tokens if self._config.pipelining else 0)

    def block(self, max_depth: int) -> Growth | Budget:
        depth = min(self.gamma, max_depth)
        self._asked_rows = (1,) * depth
        return Growth.chain(depth)

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:
        """Chains of gamma below each outcome; where the table is full, the unlikely ones are cut first."""
        depth = min(self.gamma, max_depth)
        if not self._config.pipelining or depth < 1:
            return NO_GROWTH
        budget = TableBudget(
            num_nodes=self._max_table_tokens,
            num_passes=depth + 1,
            rows_per_pass=UNBOUNDED,
            max_depth=depth,
            block_nodes=depth,
            fanout=self._config.table_fanout,
            is_chain=True,
        )
        return self._table(shape, self._first_law, budget)


class HeuristicPilot(StaticPilot):
    """Two guesses more after a block that was accepted whole, one less otherwise. Source: transformers' schedule."""

    _gamma = FIRST_GAMMA

    @property
    def gamma(self) -> int:
        return min(self._gamma, self._max_depth)

    @property
    def rule(self) -> str:
        return f"to begin with; +2 after a block that was accepted whole, -1 otherwise, up to {self._max_depth}"

    def saw_round(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        if not len(seen.shape) or seen.shape.source is Source.LOOKUP:
            return
        before, accepted, guesses = self.gamma, len(seen.path), len(seen.shape)
        self._gamma = max(1, min(before + (2 if accepted == guesses else -1), self._max_depth))
        if self.gamma != before:
            reason = f"{self.kind}: gamma {before} -> {self.gamma}, {accepted} of {guesses} guesses were accepted"
            self._known.change(self._doing, reason)


class SurePilot(StaticPilot):
    """As far as the draft is sure: by its largest probability, or by its entropy.

    Both are functions of q. A rule that looked at the drawn token would bias rejection and block verification.
    """

    @property
    def rule(self) -> str:
        if self._config.policy == "entropy":
            return f"while the entropy of q is at most {self._config.max_entropy:g} nats"
        return f"while the largest probability of q is at least {self._config.min_confidence:g}"

    @property
    def stop(self) -> StopRule:
        config = self._config
        by_entropy = config.policy == "entropy"
        return StopRule(
            min_confidence=0.0 if by_entropy else config.min_confidence,
            max_entropy=config.max_entropy if by_entropy else math.inf,
        )

    def num_to_verify(self, shape: Shape) -> int:
        """The guesses before the first that comes from an unsure q; the draft grows none below it by itself."""
        if shape.source is Source.LOOKUP:
            return len(shape)
        stop = self.stop
        pairs = zip(shape.confidence, shape.entropy, strict=True)
        return sum(1 for _ in takewhile(lambda q: q[0] >= stop.min_confidence and q[1] <= stop.max_entropy, pairs))


class StaticTreePilot(StaticPilot):
    """Always the `max_block_tokens` likeliest nodes of the draft's tree, by the draft's own chances.

    Nothing is learned or searched: the sizes of tree and table are settings. Source: EAGLE-2's trees (Li et al. 2024,
    arXiv 2406.16858). Where the draft samples, trees are not verified, and this is `static`.
    """

    _is_chooser = True

    @property
    def rule(self) -> str:
        if self._is_sampled:
            return super().rule
        return f"always the {self._max_nodes} likeliest nodes, at most {self.gamma} deep"

    @property
    def _doing(self) -> Doing:
        return replace(super()._doing, block_tokens=self._max_nodes)

    def block(self, max_depth: int) -> Growth | Budget:
        if self._is_sampled:
            return super().block(max_depth)
        depth = min(self.gamma, max_depth)
        return self._likeliest(self._max_nodes, depth, math.ceil(self._max_nodes / max(depth, 1)))

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:
        """Of all outcomes at once: likely ones get larger blocks. A pass feeds as many rows as a block has nodes."""
        if self._is_sampled or not self._config.pipelining:
            return super().table(shape, max_depth)
        return self._likeliest(self._max_table_tokens, min(self.gamma, max_depth), self._max_nodes)

    def num_to_verify(self, shape: Shape) -> int:
        """Below a likely outcome a table may hold more than a block may have."""
        return len(shape) if shape.source is Source.LOOKUP else min(len(shape), self._max_nodes)

    @property
    def _max_nodes(self) -> int:
        return self._max_block_tokens

    def _likeliest(self, num_nodes: int, depth: int, num_rows: int) -> Growth | Budget:
        """Grown by the draft, which goes by what it says itself: no profile and no level of the text bends it."""
        if num_nodes < 1 or depth < 1:
            return NO_GROWTH
        self._asked_rows = (num_rows,) * depth
        return Budget(num_nodes, depth, num_rows, depth, MAX_FANOUT, tail=USUAL_TAIL)


class PathPilot(StaticPilot):
    """A chain that ends where the product of the draft's own chances falls below a fixed value, or after gamma.

    In rejection and block mode the chances are the largest of each q, which a rule may look at, whatever was drawn.
    """

    _is_chooser = True

    @property
    def rule(self) -> str:
        return f"while the product of the draft's chances is at least {self._config.min_path_probability:g}"

    def block(self, max_depth: int) -> Growth | Budget:
        if self._is_sampled:
            return super().block(max_depth)
        return self._chains(self.gamma, min(self.gamma, max_depth), 1, 1, self._config.min_path_probability)

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:
        """Below as many outcomes as `static` prepares for, likelier ones first."""
        if self._is_sampled or not self._config.pipelining:
            return super().table(shape, max_depth)
        num_rows, fanout = (1 + self.gamma) * self._config.table_fanout, self._config.table_fanout
        return self._chains(self._max_table_tokens, min(self.gamma, max_depth), num_rows, fanout)

    def num_to_verify(self, shape: Shape) -> int:
        """The guesses before the first that the text reaches with too small a chance."""
        if shape.source is Source.LOOKUP:
            return len(shape)
        chances = accumulate(shape.confidence, operator.mul)
        return sum(1 for _ in takewhile(lambda chance: chance >= self._config.min_path_probability, chances))

    def _chains(
        self, num_nodes: int, depth: int, num_rows: int, fanout: int, min_reach: float = 0.0
    ) -> Growth | Budget:
        if num_nodes < 1 or depth < 1:
            return NO_GROWTH
        self._asked_rows = (num_rows,) * depth
        return Budget(num_nodes, depth, num_rows, depth, fanout, tail=USUAL_TAIL, min_reach=min_reach, is_chain=True)
