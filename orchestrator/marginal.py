"""Control at the margin: everything is decided by one price, the tokens a second that a session makes at the moment.

Knows chances, costs and times; must not know tokens. No plan, no search (DESIGN, section 6).
"""

from __future__ import annotations

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.speculation.tree import Floats
from core.trees import NO_GROWTH, Budget, Growth, Steady
from orchestrator.knowledge import Doing, Knowledge
from orchestrator.pilot import Shape
from orchestrator.watching import WatchingPilot

import numpy as np

ROWS_PER_PASS = 64
KEPT = 0.8
"""Of a node's chance, what its likeliest children have together."""
RATE_WINDOW = 16.0
"""Rounds."""


class MarginalPilot(WatchingPilot):
    """What is worth its time."""

    _is_chooser = True

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._round_tokens = 2.0
        self._round_s = knowledge.verify.passes(1.0) * 1.2
        knowledge.begin(Doing(self._max_depth, config.max_block_tokens), f"{self.kind}: marginal")

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
        return self._config.max_block_tokens

    @property
    def pass_s(self) -> float:
        """Of the draft, at the width that it was told."""
        return self._known.draft.passes(ROWS_PER_PASS)

    @property
    def miss_s(self) -> float:
        """From a verdict that the tree does not know to what grows below it."""
        return 1.5 * self.pass_s + self._known.draft.hop_s

    def steady(self, room: int) -> Steady | None:
        depth = min(room, 2 * self._max_depth + 1)
        if depth < 1 or not self._max_depth:
            return None
        law = self._law.at(1)
        usual = tuple(min(chance / (1.0 - law[0]), 1.0) for chance in law[1:9])
        scale = max(sum(usual), 1.0)
        return Steady(ROWS_PER_PASS, depth, 0.0, self._fit.line(law[0]), tuple(chance / scale for chance in usual))

    def num_worth(self, reach: Floats) -> int:
        """How many of these nodes, likeliest first, are worth the time that verifying them takes."""
        if not len(reach):
            return 0
        economy, rate = self._known.economy(), self.rate
        base_s = economy.verify_s(0.0)
        gains = np.cumsum(reach)
        price = np.array([economy.verify_s(float(num)) - base_s for num in range(1, len(reach) + 1)]) * rate
        return max(1, int(np.argmax(gains - price)) + 1)

    def patience(self, chosen: Floats, leaves: Floats, eta_s: float) -> float | None:
        """How long to wait for a pass that comes in `eta_s` and goes on at `leaves`; None: not at all."""
        grown = np.concatenate([chosen, KEPT * leaves[:ROWS_PER_PASS]])
        best = np.sort(grown)[::-1][: self.max_nodes]
        gain = float(best.sum() - chosen.sum())
        return self.patience_s if gain > self.rate * eta_s else None

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """A whole round."""
        keep = 1.0 - 1.0 / RATE_WINDOW
        self._round_tokens = keep * self._round_tokens + (1 - keep) * num_tokens
        self._round_s = keep * self._round_s + (1 - keep) * elapsed_s

    def saw_pass(self, timing: Timing) -> None:
        self._known.draft.passes.see(timing.num_rows, timing.computed_s)

    # Not used where a draft grows steadily

    def block(self, max_depth: int) -> Growth | Budget:  # noqa: ARG002
        return NO_GROWTH

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:  # noqa: ARG002
        return NO_GROWTH
