"""Pauses before a session tries for a draft again.

Knows durations alone.
"""

from __future__ import annotations

import random

MAX_PAUSE_S = 60.0


class Backoff:
    """Each pause is twice as long as the one before, and jittered, so that many sessions do not come back as one."""

    def __init__(self, first_s: float, seed: str) -> None:
        self._first_s = first_s
        self.pause_s = first_s
        """The next one, without jitter."""
        self._jitter = random.Random(seed)  # noqa: S311  spreads load, keeps no secret

    def next_s(self) -> float:
        """The pause to make now."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, MAX_PAUSE_S)
        return pause_s * self._jitter.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The draft has been of use."""
        self.pause_s = self._first_s
