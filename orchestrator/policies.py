"""The named policies: simple rules, for those who want them and to compare with.

Knows shapes and settings; must not know tokens.
"""

from __future__ import annotations

import math
from itertools import takewhile

from core.config import SpeculationConfig
from core.records import GenerationRequest, StopRule
from core.shapes import RankLaw
from core.tables import TableBudget
from core.trees import NO_GROWTH, Growth
from orchestrator.knowledge import Doing, Knowledge
from orchestrator.pilot import RoundSeen, Shape, Source
from orchestrator.watching import WatchingPilot

UNBOUNDED = 1 << 30
FIRST_GAMMA = 4
"""Where the heuristic begins."""


class StaticPilot(WatchingPilot):
    """Always gamma guesses in a row, and a table of the same fan-out wherever a block may end."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._first_law: RankLaw = knowledge.prior_law(self.kind, is_sampled=self._is_sampled)
        self._bounds = self.bounds(is_chain=True)
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
        return Doing(self.gamma, self.gamma, self._bounds.max_table_tokens if self._config.pipelining else 0)

    def block(self, max_depth: int) -> Growth:
        depth = min(self.gamma, max_depth)
        self._asked_rows = (1,) * depth
        return Growth.chain(depth)

    def table(self, shape: Shape, max_depth: int) -> Growth:
        """Chains of gamma below each outcome; where the table is full, the unlikely ones are cut first."""
        depth = min(self.gamma, max_depth)
        if not self._config.pipelining or depth < 1:
            return NO_GROWTH
        budget = TableBudget(
            num_nodes=self._bounds.max_table_tokens,
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
