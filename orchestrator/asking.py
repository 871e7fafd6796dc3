"""The adaptive policy where a draft is asked for each block: how far to guess, by costs and acceptance as observed.

That is where drafts sample: rejection and block verification. All others have a draft that grows a tree
(`orchestrator.marginal`). Knows a session's own acceptance and the plan
that it shares with others (`course`); must not know tokens.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np

from core.config import SpeculationConfig
from core.planning import PLAIN, Plan
from core.records import GenerationRequest
from core.trees import NO_GROWTH, Growth
from orchestrator.course import Course
from orchestrator.knowledge import Knowledge
from orchestrator.pilot import DraftSeen, RoundSeen, Shape, Source
from orchestrator.watching import WatchingPilot


class AskingPilot(WatchingPilot):
    """Maximises forecast tokens a second, within what the request allows."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._course: Course | None = None
        if self._max_depth:
            num_table = self._max_table_tokens if config.pipelining else 0
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

    def block(self, max_depth: int) -> Growth:
        """Where the target waits."""
        depth = min(self.plan.depth, max_depth)
        if self._course is None or depth < 1 or not self._course.waits_on_a_miss:
            return NO_GROWTH
        self._asked_rows = (1,) * depth
        return Growth.chain(depth)

    def table(self, shape: Shape, max_depth: int) -> Growth:
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
        most = min(len(shape), self._max_depth)
        economy = self._known.economy()
        seconds = [economy.verify_s(num) for num in range(1, most + 1)]
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
        """Chance of each guess of a chain that it is accepted, from depth and the draft's confidence there."""
        chances = (
            self._fit.adjust(self._law.at(depth)[0], sure) for depth, sure in enumerate(shape.confidence, start=1)
        )
        return list(accumulate(chances, mul))
