"""The adaptive policy where a draft is asked for each block: how far to guess, by costs and acceptance as observed.

That is where drafts sample (rejection and block verification), and where drafting and verification are to alternate;
all others have a draft that grows steadily (`orchestrator.marginal`). Knows a session's own acceptance and the plan
that it shares with others (`course`); must not know tokens.
"""

from __future__ import annotations

import numpy as np

from core.config import SpeculationConfig
from core.planning import MAX_FANOUT, PLAIN, Plan
from core.records import GenerationRequest
from core.trees import NO_GROWTH, Budget, Growth, num_branches
from orchestrator.course import Course
from orchestrator.knowledge import Knowledge
from orchestrator.pilot import DraftSeen, RoundSeen, Shape, Source
from orchestrator.watching import WatchingPilot


class AskingPilot(WatchingPilot):
    """Maximises forecast tokens a second, within what the request allows."""

    _is_chooser = True

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._course: Course | None = None
        if self._max_depth:
            num_table = self._max_table_tokens if config.pipelining and self._is_sampled else 0
            key = (self.kind, self._max_depth, num_table)
            self._course = knowledge.course(
                key, lambda: Course(self.kind, self._profile, self._max_depth, num_table, knowledge)
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
        """Where the target waits. Where any rule may choose, the draft does: it knows where it is sure."""
        depth = min(self.plan.depth, max_depth)
        if self._course is None or depth < 1 or not self._course.waits_on_a_miss:
            return NO_GROWTH
        if self._is_sampled or self._course.is_trial:
            self._asked_rows = (1,) * depth
            return Growth.chain(depth)
        return self._chosen(self._course, depth, max_depth)

    def _chosen(self, course: Course, planned: int, max_depth: int) -> Budget:
        """Pass after pass while one gains more than its time would yield, and as many as planned where that is nothing.

        A pass gains the chances of its nodes, each times that of a guess below it.
        """
        economy, head = self._known.economy(), self._law.at(1)[0]
        rows = economy.rows_worth()
        price = economy.pass_price(course.rate, rows)
        depth = min(2 * planned, self._max_depth, max_depth) if price else planned  # it must be late at some time
        self._asked_rows = (rows,) * planned
        return Budget(
            num_nodes=self._max_block_tokens,
            num_passes=depth,
            rows_per_pass=rows,
            max_depth=depth,
            fanout=MAX_FANOUT,
            sureness=self._fit.line(head),
            tail=self._tail(MAX_FANOUT - 1),
            min_reach=price / head,
        )

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:
        """Only of samples: others grow steadily while the target works."""
        if self._course is None or self.plan.rows_per_pass == 0 or max_depth < 1:
            return NO_GROWTH
        return self._table(shape, self._law, self.plan.table(self._max_table_tokens, max_depth))

    def num_to_verify(self, shape: Shape) -> int:
        """As many as gain most: each gains its chance to be accepted, and the block costs the time that it takes.

        The first one is verified whatever it costs: what is never verified is never learned, and where it does not pay
        the plan will soon be not to draft.
        """
        if shape.source is Source.LOOKUP or self._course is None or not len(shape):
            return len(shape)
        most = min(len(shape), self._max_block_tokens)
        economy = self._known.economy()
        branches = [num_branches(shape.parents[:num]) for num in range(1, most + 1)] if economy.branch_s else [0] * most
        seconds = [economy.verify_s(num, more) for num, more in enumerate(branches, start=1)]
        return 1 + int(np.argmax(np.cumsum(self._survival(shape)[:most]) - self._course.rate * np.array(seconds)))

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
