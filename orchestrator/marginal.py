"""Control at the margin: what a node, a wait and a row of the draft are worth, at one price.

The price is `rate`, the tokens a second that the session makes at the moment. Knows chances, costs and times; must not
know tokens. There is no plan and no search.
"""

from __future__ import annotations

import math

import numpy as np

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.speculation.tree import Floats
from core.trees import NO_GROWTH, Budget, Growth, Steady
from orchestrator.knowledge import Doing, Knowledge, Lookups
from orchestrator.pilot import Shape
from orchestrator.watching import WatchingPilot

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Rows that one session may have in a pass of the draft; those further down its list are hardly ever needed."""
MAX_ROWS = WIDTHS[-1]
TOLD_RANKS = 8
"""Candidates of a place of which the draft is told how likely they are."""
KEPT = 0.8
"""Of a node's chance, what those of its children have together that will be told."""
RATE_ROUNDS = 16.0
"""Over which the rate is averaged."""


class MarginalPilot(WatchingPilot):
    """Verifies, waits for and drafts what is worth more than its time."""

    _is_chooser = True

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._num_intervals = 0
        self._round_tokens = 1.0 + self._law.at(1)[0]
        self._round_s = knowledge.lately.verify_s(0.0)
        if self._max_depth:
            doing = Doing(self._max_depth, config.max_block_tokens, MAX_ROWS)
            knowledge.begin(doing, f"{self.kind}: gamma {self._max_depth} at most, while guesses are worth it")

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._round_tokens / self._round_s

    @property
    def max_depth(self) -> int:
        """Guesses in a row."""
        return self._max_depth

    @property
    def max_nodes(self) -> int:
        """Of a block."""
        return self._config.max_block_tokens

    @property
    def lookups(self) -> Lookups:
        """What looked-up tokens have been worth."""
        return self._known.lookups

    @property
    def pass_s(self) -> float:
        """Of the draft, as wide as it was told."""
        return self._known.draft.passes(self._asked_rows[0] if self._asked_rows else 1.0)

    @property
    def first_pass_s(self) -> float:
        """Until something grows below a token that the draft did not foresee: a pass is under way when it hears."""
        return 1.5 * self.pass_s + self._known.draft.hop_s

    def steady(self, room: int) -> Steady | None:
        """How the draft is to grow, in a context that has `room` tokens left; None: not at all."""
        depth = min(room, 2 * self._max_depth + 1)  # below any outcome of a block as deep as may be lies another
        if depth < 1 or self._max_depth < 1:
            return None
        num_sharing = max(1.0, self._known.num_sharing_drafts)
        rows = round(num_sharing * self._rows_worth(num_sharing))
        self._asked_rows = (rows,)
        head, *others = self._law.at(1)[: TOLD_RANKS + 1]
        tail = [min(chance / (1.0 - head), 1.0) for chance in others]
        scale = max(sum(tail), 1.0)
        return Steady(rows, depth, 0.0, self._fit.line(head), tuple(chance / scale for chance in tail))

    def _rows_worth(self, num_sharing: float) -> int:
        """Rows a session that yield most for the time of a pass: the r-th likeliest is needed about 1/r as often."""
        passes = self._known.draft.passes
        return max(WIDTHS, key=lambda rows: math.log1p(rows / 2.0) / passes(num_sharing * rows))

    def num_worth(self, reach: Floats) -> int:
        """How many of the nodes with these chances, falling, are worth the time that verifying them takes."""
        economy = self._known.economy()
        prices = [self.rate * (economy.verify_s(float(num)) - economy.verify_s(0.0)) for num in range(len(reach) + 1)]
        return int(np.argmax(np.concatenate([[0.0], np.cumsum(reach)]) - np.array(prices)))

    def is_worth_waiting(self, reach: Floats, open_reach: Floats, next_s: float) -> bool:
        """Whether the draft's next pass, in `next_s`, adds more to a block of `reach` than the time would yield."""
        grown = np.concatenate([reach, KEPT * open_reach[:MAX_ROWS]])
        best = np.sort(grown)[::-1][: self.max_nodes]
        return bool(best.sum() - reach.sum() > self.rate * max(next_s, 0.25 * self.pass_s))

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """A round, from verdict to verdict."""
        self._num_intervals += 1
        share = 1.0 / min(self._num_intervals, RATE_ROUNDS)
        self._round_tokens += (num_tokens - self._round_tokens) * share
        self._round_s += (elapsed_s - self._round_s) * share

    def saw_pass(self, timing: Timing) -> None:
        """One of the draft's."""
        self._known.draft.passes.see(timing.num_rows, timing.computed_s)

    # What is asked for only of drafts that do not grow steadily

    def block(self, max_depth: int) -> Growth | Budget:  # noqa: ARG002
        return NO_GROWTH

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:  # noqa: ARG002
        return NO_GROWTH
