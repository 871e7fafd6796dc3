"""Control at the margin: what a node, a wait and a row of the draft are worth, at one price.

The price is `rate`, the tokens a second that the session makes at the moment. Knows chances, costs and times; must not
know tokens. There is no plan and no search.
"""

from __future__ import annotations

import numpy as np

from core.config import SpeculationConfig
from core.records import GenerationRequest, Timing
from core.trees import NO_GROWTH, Budget, Floats, Growth, Ints, Steady
from orchestrator.knowledge import Doing, Knowledge, Lookups
from orchestrator.pilot import Found, RoundSeen, Shape, Source
from orchestrator.watching import WatchingPilot

TOLD_RANKS = 8
"""Candidates of a place of which the draft is told how likely they are."""
RATE_ROUNDS = 16.0
"""Over which the rate is averaged."""
FIRST_ROUNDS = 4.0
"""That what is usual counts for, to begin with."""
REST_ROUNDS = 32
"""In which nothing was worth verifying: then the draft rests."""
TRIAL_ROUNDS = 8
"""In which something has to be, after that."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Of a rest; each trial in vain doubles it."""


class MarginalPilot(WatchingPilot):
    """Verifies, waits for and drafts what is worth more than its time."""

    _is_chooser = True

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        self._num_rows = 1
        self._num_idle = 0
        """Rounds in a row in which something had grown, and nothing of it was worth verifying."""
        self._pause_s = FIRST_PAUSE_S
        self._is_resting = False
        self._num_intervals = 0
        self._round_tokens, self._round_s = knowledge.usual_round(self.kind, 1.0 + self._law.at(1)[0])
        self._doing = Doing(self._max_depth, config.max_block_tokens)
        if self._max_depth:
            knowledge.begin(self._doing, f"{self.kind}: gamma {self._max_depth} at most, while guesses are worth it")

    @property
    def rate(self) -> float:
        """Tokens that a second is worth: what the session makes in one, and not less than plain decoding would."""
        return max(self._round_tokens / self._round_s, 1.0 / self._known.lately.verify_s(0.0))

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
        if self._is_resting:
            self._is_resting = False
            self._known.change(self._doing, f"{self.kind}: gamma 0 -> {self._max_depth}, a trial after rest")
        self._num_rows = self._known.lately.rows_worth()
        rows = round(self._known.num_sharing_drafts * self._num_rows)
        self._asked_rows = (rows,)
        return Steady(rows, depth, 0.0, self._fit.line(self._law.at(1)[0]), self._tail(TOLD_RANKS))

    @property
    def minds_branches(self) -> bool:
        """Whether a branch of a block costs more than its rows."""
        return self._known.lately.branch_s > 0.0

    def net(self, reach: Floats, branches: Ints | None = None) -> Floats:
        """For each n from 0 on: tokens that the first n nodes gain, less what the time to verify them would yield.

        `reach` [N]: their chances, falling; `branches` [N]: of the nodes up to each, None for none.  # [N + 1]
        """
        economy = self._known.lately
        seconds = economy.verify_times(len(reach))
        gained = np.zeros(len(reach) + 1)
        np.cumsum(reach, out=gained[1:])
        gained -= self.rate * (seconds - seconds[0])
        if branches is not None:
            gained[1:] -= self.rate * economy.num_verifying * economy.branch_s * branches
        return gained

    def is_worth_waiting(self, reach: Floats, open_reach: Floats, next_s: float) -> bool:
        """Whether the draft's next pass, in `next_s`, adds more to the best block than the time would yield.

        `reach`: of the nodes that a block could have now; `open_reach`: of those that the draft has not fed; falling.
        Who waits where passes of the target are shared misses the others' pass, and waits for the one after it.
        """
        grown = np.sort(np.concatenate([reach, open_reach[: self._num_rows]]))[::-1][: self.max_nodes]
        economy = self._known.lately
        lost_s = economy.verify_s(0.0) if economy.is_shared else max(next_s, 0.25 * self.pass_s)
        return bool(self.net(grown).max() - self.net(reach).max() > self.rate * lost_s)

    @property
    def wants_rest(self) -> bool:
        """Whether the draft has grown for long enough what was not worth verifying."""
        return self._num_idle >= REST_ROUNDS

    def rest(self) -> float:
        """Seconds to go without a draft. What it grows after that has to be of use sooner, or it rests for longer."""
        pause_s, self._pause_s = self._pause_s, min(2.0 * self._pause_s, MAX_PAUSE_S)
        self._num_idle, self._is_resting = REST_ROUNDS - TRIAL_ROUNDS, True
        economy = self._known.economy()
        plain_ms, more_ms = (1e3 * economy.verify_s(num) for num in (0.0, 1.0))
        why = (
            f"no guess was worth its row for {REST_ROUNDS} rounds: {economy.num_verifying:.1f} sessions, a verification"
        )
        self._known.change(
            Doing(),
            f"{self.kind}: gamma {self._max_depth} -> 0, {why} {more_ms:.1f} ms with one each, "
            f"{plain_ms:.1f} ms without",
        )
        return pause_s

    def saw_round(self, seen: RoundSeen) -> None:
        """What is learned from it is learned when the next block is on its way."""
        self._known.later(lambda: self._learn_from(seen))
        if seen.shape.source is Source.DRAFT and seen.shape.num_looked_up < len(seen.shape):
            self._num_idle, self._pause_s = 0, FIRST_PAUSE_S
        elif seen.found is not Found.NOT_ASKED:
            self._num_idle += 1

    def _learn_from(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        self._known.economy()

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """A round, from verdict to verdict."""
        self._num_intervals += 1
        share = 1.0 / min(self._num_intervals + FIRST_ROUNDS, RATE_ROUNDS)
        self._round_tokens += (num_tokens - self._round_tokens) * share
        self._round_s += (elapsed_s - self._round_s) * share
        self._known.saw_interval(self.kind, num_tokens, elapsed_s)

    def saw_pass(self, timing: Timing) -> None:
        """One of the draft's."""
        self._known.draft.passes.see(timing.num_rows, timing.computed_s)

    # What is asked for only of drafts that do not grow steadily

    def block(self, max_depth: int) -> Growth | Budget:  # noqa: ARG002
        return NO_GROWTH

    def table(self, shape: Shape, max_depth: int) -> Growth | Budget:  # noqa: ARG002
        return NO_GROWTH
