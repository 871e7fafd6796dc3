"""The adaptive policy: how far and how wide to guess, by costs and acceptance as they are observed.

Knows a session's own acceptance and the plan that it shares with others (`course`); must not know tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from core.config import SpeculationConfig
from core.planning import PLAIN, Plan, block_of, chosen_block, chosen_table, table_budget
from core.records import GenerationRequest
from core.trees import NO_GROWTH, Budget, Growth, num_branches
from orchestrator.course import Course
from orchestrator.knowledge import Knowledge
from orchestrator.pilot import DraftSeen, RoundSeen, Shape, Source
from orchestrator.watching import WatchingPilot

NEGLIGIBLE_PRICE = 0.01
"""Tokens for a guess; a block is not cut for less."""


class AdaptivePilot(WatchingPilot):
    """Maximises forecast tokens a second, within what the request allows."""

    _is_chooser = True

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._course: Course | None = None
        if self._max_depth:
            bounds = self.bounds(is_chain=False)
            self._course = knowledge.course(
                (self.kind, bounds), lambda: Course(self.kind, self._profile, bounds, knowledge)
            )
            self._course.join(self)

    @property
    def plan(self) -> Plan:
        """What is done at present."""
        return self._course.plan_of(self) if self._course is not None else PLAIN

    @property
    def wants_draft(self) -> bool:
        return not self.plan.is_plain

    def block(self, max_depth: int) -> Growth | Budget:
        """On a miss, or where drafting and verification alternate: what the wait for it yields most.

        Where any rule may choose, the draft does: it knows where it is sure.
        """
        plan = self.plan
        if self._course is None or plan.is_plain:
            return NO_GROWTH
        plan = self._course.just_in_time if plan.num_passes else plan
        depth = min(plan.depth, max_depth)
        if plan.is_plain or depth < 1:
            return NO_GROWTH
        if self._is_sampled:
            tree = block_of(self._law, replace(plan, depth=depth), self._course.bounds)
            self._asked_rows = tree.rows
            return tree.growth
        budget = chosen_block(plan, self._course.bounds, self._law, self._sureness, max_depth, self._course.pass_price)
        self._asked_rows = (budget.rows_per_pass,) * budget.num_passes
        return budget

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:
        """Chosen by the draft, too, where any rule may."""
        plan = self.plan
        if self._course is None or plan.num_passes == 0 or max_depth < 1:
            return NO_GROWTH
        bounds = self._course.bounds
        if self._is_sampled:
            return self._table(shape, self._law, table_budget(plan, bounds, max_depth))
        budget = chosen_table(plan, bounds, self._law, self._sureness, max_depth)
        self._asked_rows = (budget.rows_per_pass,) * budget.num_passes
        return budget

    def num_to_verify(self, shape: Shape) -> int:
        """As many as gain most: each gains its survival, and the block costs the time that it takes.

        The first one is verified whatever it costs: what is never verified is never learned, and where it does not pay
        the plan will soon be not to draft.
        """
        if shape.source is Source.LOOKUP or self._course is None:
            return len(shape)
        most = min(len(shape), self._course.max_nodes)
        if self._course.block_price(most, num_branches(shape.parents[:most])) < NEGLIGIBLE_PRICE * most:
            return most
        gain, best, num_best = 0.0, -math.inf, 0
        for num, survival in enumerate(self._survival(shape)[:most], start=1):
            gain += survival
            if (net := gain - self._course.block_price(num, num_branches(shape.parents[:num]))) > best:
                best, num_best = net, num
        return num_best

    def saw_round(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        if self._course is not None:
            self._course.saw_round(self, self._level.shift)

    def saw_draft(self, seen: DraftSeen) -> None:
        super().saw_draft(seen)
        if self._course is not None:
            self._course.saw_answer(self)

    def saw_late_draft(self) -> None:
        super().saw_late_draft()
        if self._course is not None:
            self._course.saw_answer(self)

    def close(self) -> None:
        super().close()
        if self._course is not None:
            self._course.leave(self)

    @property
    def _sureness(self) -> tuple[float, float]:
        """What the draft's leads are worth in this text."""
        return self._fit.line(self._law.at(1)[0])

    def _survival(self, shape: Shape) -> list[float]:
        """Chance of each node that it is accepted, from depth, rank and the draft's confidence there."""
        reach: list[float] = []
        deep: list[int] = []
        for parent, rank, confidence in zip(shape.parents, shape.ranks, shape.confidence, strict=True):
            depth = 1 if parent < 0 else deep[parent] + 1
            chances = self._law.at(depth)
            head = self._fit.adjust(chances[0], confidence)
            chance = head
            if rank:
                chance = chances[rank] * (1.0 - head) / (1.0 - chances[0]) if rank < len(chances) else 0.0
            deep.append(depth)
            reach.append(chance * (1.0 if parent < 0 else reach[parent]))
        return reach
