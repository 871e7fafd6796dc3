"""Detection of silent drafts: the session does not wait for them, and leaves them after several rounds.

Knows rounds and times; must not know messages, trees or leases.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_OPEN = 4
"""Maximum number of messages that a draft has not ended. At this limit it counts as silent and gets no more."""


class Silence:
    """The silence of one draft."""

    def __init__(self, breaker_rounds: int) -> None:
        """`breaker_rounds`: number of late rounds in a row after which the draft is left."""
        self._breaker_rounds = breaker_rounds
        self.is_silent = False
        """Whether the draft was lost, was late, or has not answered for `MAX_OPEN` rounds. The next update clears it,
        under this lease or another."""
        self._num_unanswered = 0
        """Number of rounds reported to the draft, or held back, since its last answer."""
        self._answered_s = 0.0
        """Time of the last verdict before these rounds, in seconds."""
        self._num_late_rounds = 0

    @property
    def is_final(self) -> bool:
        """Whether the draft should be left."""
        return self._num_late_rounds >= self._breaker_rounds

    def begin_round(self, now_s: float, max_silence_s: Callable[[], float]) -> None:
        """Count a late round if the draft is still late from an earlier one.

        It also counts as late after `max_silence_s` seconds without an answer, even if no block waits for it.
        """
        if not self._num_unanswered:
            self._answered_s = now_s
        if self._num_late_rounds or (self._num_unanswered > MAX_OPEN and now_s - self._answered_s > max_silence_s()):
            self._num_late_rounds += 1

    def round_sent(self) -> None:
        """Count a round that was sent to the draft, or was held back."""
        self.is_silent |= self._num_unanswered >= MAX_OPEN
        self._num_unanswered += 1

    def message_ended(self) -> None:
        """Record that the draft ended a message."""
        self._num_unanswered = 0

    def update_arrived(self) -> None:
        """Record an update from the draft."""
        self.is_silent, self._num_unanswered, self._num_late_rounds = False, 0, 0

    def timed_out(self) -> None:
        """Record a timeout."""
        self.is_silent = True
        self._num_late_rounds += 1

    def draft_left(self) -> None:
        """Record that the session has no draft for now."""
        self.is_silent, self._num_unanswered, self._num_late_rounds = True, 0, 0
