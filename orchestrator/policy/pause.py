"""Whether drafting pays by the clock: the rate of rounds with it against the rate without, tried now and then.

Knows tokens a second; must not know costs. Where a draft takes processor time from its target or from the orchestrator,
both become slower, plain decoding too, and no estimate of a pass says by how much.
"""

from __future__ import annotations

from collections.abc import Callable

WINDOW_ROUNDS = 8
"""Rounds of each session over which a rate is measured, and at least `LEAST_ROUNDS` of all together."""
LEAST_ROUNDS = 32
SETTLING_ROUNDS = 2
"""Rounds of each session that are not measured after a change: passes are still under way, drafts have to catch up."""
MAX_WINDOWS = 32
"""Most windows between two trials; their number doubles from 1 with each trial that changed nothing."""
GAIN = 1.02
"""Ratio of rates from which a trial changes something."""
SIMILAR = 1.5
"""Ratio of numbers of sessions up to which two rates can be compared."""


class DraftingPause:
    """All sessions of an orchestrator draft, or none does; a trial of the other way decides."""

    def __init__(self) -> None:
        self.is_paused = False
        self._is_trial = False
        self._usual = 0.0
        """Tokens a second of a session, before the trial."""
        self._usual_sessions = 1
        self._num_windows = 0
        """Windows since the last trial."""
        self._num_wanted = 1
        self._num_settling = 0
        self._rounds = self._tokens = self._seconds = 0.0

    def __repr__(self) -> str:
        return f"<DraftingPause {'plain' if self.is_paused else 'drafting'}, {self._usual:.1f} tokens/s>"

    def saw_round(self, num_tokens: int, elapsed_s: float, num_sessions: int, most_plain: Callable[[], float]) -> str:
        """One round of a session that drafts unless there is a pause. The reason of a change, empty for none.

        `most_plain`: tokens a second of a session that plain decoding has never exceeded; drafting that makes more
        needs no trial.
        """
        if self._num_settling > 0:
            self._num_settling -= 1
            return ""
        self._rounds += 1
        self._tokens += num_tokens
        self._seconds += elapsed_s
        if self._rounds < max(LEAST_ROUNDS, WINDOW_ROUNDS * num_sessions):
            return ""
        rate = self._tokens / self._seconds if self._seconds > 0.0 else 0.0
        if self._is_trial:
            return self._end_trial(rate, num_sessions)
        self._usual, self._usual_sessions = rate, num_sessions
        self._num_windows += 1
        self._rounds, self._tokens, self._seconds = 0.0, self._tokens / 2, self._seconds / 2
        if self._num_windows >= self._num_wanted and (self.is_paused or rate < most_plain()):
            self._is_trial = True
            self._change(num_sessions)
        return ""

    def _end_trial(self, rate: float, num_sessions: int) -> str:
        sessions = sorted((num_sessions, self._usual_sessions))
        is_better = rate > GAIN * self._usual and sessions[1] <= SIMILAR * sessions[0]
        self._is_trial, self._num_windows = False, 0
        self._num_wanted = 1 if is_better else min(2 * self._num_wanted, MAX_WINDOWS)
        if not is_better:
            self._change(num_sessions)
            return ""
        self._rounds, self._tokens, self._seconds = 0.0, self._tokens / 2, self._seconds / 2
        way, other = ("without", "with") if self.is_paused else ("with", "without")
        return f"sessions made {rate:.1f} tokens/s {way} drafting, {self._usual:.1f} {other}"

    def _change(self, num_sessions: int) -> None:
        self.is_paused = not self.is_paused
        self._num_settling = SETTLING_ROUNDS * num_sessions
        self._rounds = self._tokens = self._seconds = 0.0
