"""Whether a draft tells anything: who is silent is not waited for, and left after several rounds.

Knows rounds and times; must not know messages, trees or leases.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_OPEN = 4
"""Messages that a draft has not ended: beyond that it is silent, and is told nothing more until it has."""


class Silence:
    """Of one draft."""

    def __init__(self, breaker_rounds: int) -> None:
        """`breaker_rounds`: rounds in a row with a late draft after which it is left."""
        self._breaker_rounds = breaker_rounds
        self.is_silent = False
        """Whether it was lost, was late or has answered nothing for `MAX_OPEN` rounds; until it tells something again,
        perhaps under another lease."""
        self._num_unanswered = 0
        """Rounds that it was, or should have been, told of since it last answered anything."""
        self._answered_s = 0.0
        """Time of the last verdict before these."""
        self._num_late_rounds = 0

    @property
    def is_final(self) -> bool:
        """Whether the draft is to be left."""
        return self._num_late_rounds >= self._breaker_rounds

    def begin_round(self, now_s: float, most_s: Callable[[], float]) -> None:
        """There is a verdict: a draft that was late, and is not heard of since, is late once more.

        So is one for which nobody waits, after `most_s` without an answer.
        """
        if not self._num_unanswered:
            self._answered_s = now_s
        if self._num_late_rounds or (self._num_unanswered > MAX_OPEN and now_s - self._answered_s > most_s()):
            self._num_late_rounds += 1

    def told(self) -> None:
        """It is told of a round, or should be."""
        self.is_silent |= self._num_unanswered >= MAX_OPEN
        self._num_unanswered += 1

    def answered(self) -> None:
        """It has ended a message."""
        self._num_unanswered = 0

    def broken(self) -> None:
        """It tells something."""
        self.is_silent, self._num_unanswered, self._num_late_rounds = False, 0, 0

    def late(self) -> None:
        """Nothing has come for as long as is waited."""
        self.is_silent = True
        self._num_late_rounds += 1

    def left(self) -> None:
        """There is no draft for now."""
        self.is_silent, self._num_unanswered, self._num_late_rounds = True, 0, 0
