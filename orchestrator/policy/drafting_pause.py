"""Decides by measurement whether drafting pays: regular trials compare the token rate with and without drafting.

Knows tokens per second; must not know costs. A draft that shares processors with its target or with the orchestrator
slows them down. Estimates of pass times do not show this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

WINDOW_ROUNDS = 8
PLAIN_ROUNDS = 3
"""Rounds of each session over which a rate is measured: `WINDOW_ROUNDS` with drafting, `PLAIN_ROUNDS` without, because
each of these yields one token. At least `MIN_ROUNDS` of all sessions together."""
MIN_ROUNDS = 32
SETTLING_ROUNDS = 2
"""Rounds of each session that are not measured after a change: passes are still in progress, and drafts must catch
up."""
MAX_WINDOWS = 32
"""Maximum interval between two trials, both in windows and in multiples of a trial's duration. The interval starts at 1
and doubles with each trial that changes nothing. The duration counts because rounds of the worse mode are longer:
counted in windows alone, the trials of a pause would take a third of the time."""
MIN_GAIN = 1.02
"""Minimum ratio of rates for a trial to change the mode."""
MAX_SESSION_RATIO = 1.5
"""Maximum ratio of numbers of sessions for two rates to be comparable."""


class DraftingPause:
    """Pauses drafting for all sessions of an orchestrator, or for none. A trial of the other mode decides."""

    def __init__(self) -> None:
        self.is_paused = False
        self._is_trial = False
        self._usual = 0.0
        """Tokens per second of a session before the trial."""
        self._usual_sessions = 1
        self._since_s = 0.0
        """Seconds since the last trial began or ended."""
        self._trial_s = 0.0
        """Seconds that the last trial took; 0 if it changed the mode."""
        self._num_windows = 0
        """Number of windows since the last trial."""
        self._num_wanted = 1
        self._num_settling = 0
        self._tokens: list[int] = []
        """Tokens of each round, in this window and the one before."""
        self._seconds: list[float] = []

    def __repr__(self) -> str:
        return f"<DraftingPause {'plain' if self.is_paused else 'drafting'}, {self._usual:.1f} tokens/s>"

    def observe_round(
        self, num_tokens: int, elapsed_s: float, num_sessions: int, max_plain_rate: Callable[[], float]
    ) -> str:
        """Record one round of a session that drafts unless paused. Return the reason of a change, empty for none.

        `max_plain_rate`: upper bound of a session's tokens per second in plain decoding. Drafting that exceeds it needs
        no trial.
        """
        self._since_s += elapsed_s / num_sessions
        if self._num_settling > 0:
            self._num_settling -= 1
            return ""
        self._tokens.append(num_tokens)
        self._seconds.append(elapsed_s)
        num_rounds = PLAIN_ROUNDS if self.is_paused else WINDOW_ROUNDS
        if len(self._seconds) < max(MIN_ROUNDS, num_rounds * num_sessions):
            return ""
        seconds = usual_s(self._seconds)
        rate = fmean(self._tokens) / seconds if seconds > 0.0 else 0.0
        if self._is_trial:
            return self._end_trial(rate, num_sessions)
        self._usual, self._usual_sessions = rate, num_sessions
        self._tokens, self._seconds = self._tokens[-len(self._seconds) :], []
        self._num_windows += 1
        is_due = self._num_windows >= self._num_wanted and self._since_s >= self._num_wanted * self._trial_s
        if is_due and (self.is_paused or rate < max_plain_rate()):
            self._is_trial, self._since_s = True, 0.0
            self._change(num_sessions)
        return ""

    def _end_trial(self, rate: float, num_sessions: int) -> str:
        sessions = sorted((num_sessions, self._usual_sessions))
        is_better = rate > MIN_GAIN * self._usual and sessions[1] <= MAX_SESSION_RATIO * sessions[0]
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
    """Return the mean of the middle half, to ignore rounds that a prefill has lengthened."""
    cut = len(seconds) // 4
    return fmean(sorted(seconds)[cut : len(seconds) - cut])
