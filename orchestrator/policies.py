"""The named policies where a draft is asked for chains of its samples: rejection and block verification.

Knows shapes and settings; must not know tokens. Rules look at q and not at what was drawn (`orchestrator.rules`).
"""

from __future__ import annotations

import math

from core.config import SpeculationConfig
from core.estimators import RankProfile
from core.records import GenerationRequest
from core.tables import TableBudget
from core.trees import NO_GROWTH, Growth, Measure
from orchestrator.knowledge import Doing, Knowledge
from orchestrator.pilot import RoundSeen, Shape, Source
from orchestrator.rules import RULES
from orchestrator.watching import WatchingPilot

UNBOUNDED = 1 << 30
FIRST_LAW = RankProfile(1, is_sampled=True).law()
"""Acceptance before anything has been seen: these policies do not learn."""


class AskedChainPilot(WatchingPilot):
    """Chains as long as the rule says, and a table of the same fan-out wherever a block may end."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._rule = RULES[config.policy](self._max_depth, config)
        if self._max_depth:
            knowledge.begin(self._doing, f"{self.kind}: gamma {self._rule.gamma}, {self._rule.why}")

    @property
    def _doing(self) -> Doing:
        gamma = self._rule.gamma
        return Doing(gamma, gamma, self._max_table_tokens if self._config.pipelining else 0)

    def block(self, max_depth: int) -> Growth:
        depth = min(self._rule.gamma, max_depth)
        self._asked_rows = (1,) * depth
        return Growth.chain(depth)

    def table(self, shape: Shape, max_depth: int) -> Growth:
        """Chains of gamma below each outcome; where the table is full, the unlikely ones are cut first."""
        depth = min(self._rule.gamma, max_depth)
        if not self._config.pipelining or depth < 1:
            return NO_GROWTH
        budget = TableBudget(
            num_nodes=self._max_table_tokens, rows_per_pass=UNBOUNDED, depth=depth, fanout=self._config.table_fanout
        )
        return self._table(shape, FIRST_LAW, budget)

    def num_to_verify(self, shape: Shape) -> int:
        """The guesses before the first that comes from too unsure a q; the draft grows none below it by itself."""
        if shape.source is Source.LOOKUP:
            return len(shape)
        is_by_entropy = self._rule.measure is Measure.ENTROPY
        sureness = [math.exp(-entropy) for entropy in shape.entropy] if is_by_entropy else shape.confidence
        return self._rule.num_kept(sureness)

    def saw_round(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        num_guesses, before = len(seen.shape), self._rule.gamma
        if num_guesses and seen.shape.source is Source.DRAFT:
            self._rule.saw(num_guesses, len(seen.path))
        if self._rule.gamma != before:
            reason = f"gamma {before} -> {self._rule.gamma}, {len(seen.path)} of {num_guesses} guesses were accepted"
            self._known.change(self._doing, f"{self.kind}: {reason}")
