"""Whether drafting pays by the clock: the rate of rounds with it against the rate without, tried now and then.

Knows tokens a second; must not know costs. Where a draft takes processor time from its target or from the orchestrator,
both become slower, plain decoding too, and no estimate of a pass says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

WINDOW_ROUNDS = 8
PLAIN_ROUNDS = 3
"""Rounds of each session over which a rate is measured: with drafting; and without, where each yields one token. At
least `LEAST_ROUNDS` of all together."""
LEAST_ROUNDS = 32
SETTLING_ROUNDS = 2
"""Rounds of each session that are not measured after a change: passes are still under way, drafts have to catch up."""
MAX_WINDOWS = 32
"""Most windows between two trials, and most times as long as a trial; doubles from 1 with each trial that changed
nothing. By windows alone the trials of a pause would take a third of the time: rounds of the worse way are longer."""
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
        self._since_s = 0.0
        """Seconds since the last trial began or ended."""
        self._trial_s = 0.0
        """That the last trial took, if it changed nothing."""
        self._num_windows = 0
        """Windows since the last trial."""
        self._num_wanted = 1
        self._num_settling = 0
        self._tokens: list[int] = []
        """Of this window and the one before."""
        self._seconds: list[float] = []

    def __repr__(self) -> str:
        return f"<DraftingPause {'plain' if self.is_paused else 'drafting'}, {self._usual:.1f} tokens/s>"

    def observe_round(
        self, num_tokens: int, elapsed_s: float, num_sessions: int, most_plain: Callable[[], float]
    ) -> str:
        """One round of a session that drafts unless there is a pause. The reason of a change, empty for none.

        `most_plain`: tokens a second of a session that plain decoding has never exceeded; drafting that makes more
        needs no trial.
        """
        self._since_s += elapsed_s / num_sessions
        if self._num_settling > 0:
            self._num_settling -= 1
            return ""
        self._tokens.append(num_tokens)
        self._seconds.append(elapsed_s)
        num_rounds = PLAIN_ROUNDS if self.is_paused else WINDOW_ROUNDS
        if len(self._seconds) < max(LEAST_ROUNDS, num_rounds * num_sessions):
            return ""
        seconds = usual_s(self._seconds)
        rate = fmean(self._tokens) / seconds if seconds > 0.0 else 0.0
        if self._is_trial:
            return self._end_trial(rate, num_sessions)
        self._usual, self._usual_sessions = rate, num_sessions
        self._tokens, self._seconds = self._tokens[-len(self._seconds) :], []
        self._num_windows += 1
        is_due = self._num_windows >= self._num_wanted and self._since_s >= self._num_wanted * self._trial_s
        if is_due and (self.is_paused or rate < most_plain()):
            self._is_trial, self._since_s = True, 0.0
            self._change(num_sessions)
        return ""

    def _end_trial(self, rate: float, num_sessions: int) -> str:
        sessions = sorted((num_sessions, self._usual_sessions))
        is_better = rate > GAIN * self._usual and sessions[1] <= SIMILAR * sessions[0]
        self._is_trial, self._num_windows = False, 0
        self._trial_s, self._since_s = 0.0 if is_better else self._since_s, 0.0
        self._num_wanted = 1 if is_better else min(2 * self._num_wanted, MAX_WINDOWS)
        if not is_better:
            self._change(num_sessions)
            return ""
        self._tokens, self._seconds = self._tokens[-len(self._seconds) :], []
        way, other = ("without", "with") if self.is_paused else ("with", "without")
        return f"sessions made {rate:.1f} tokens/s {way} drafting, {self._usual:.1f} {other}"

    def _change(self, num_sessions: int) -> None:
        self.is_paused = not self.is_paused
        self._num_settling = SETTLING_ROUNDS * num_sessions
        self._tokens, self._seconds = [], []


def usual_s(seconds: Sequence[float]) -> float:
    """The mean of the middle half: a prompt that is taken in makes the rounds beside it long, in either way."""
    cut = len(seconds) // 4
    return fmean(sorted(seconds)[cut : len(seconds) - cut])
