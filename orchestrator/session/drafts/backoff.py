"""Pauses before a session requests a draft again.

Knows durations alone.
"""

from __future__ import annotations

import random

MAX_PAUSE_S = 60.0


class Backoff:
    """Exponential backoff with jitter, so that many sessions do not come back at once."""

    def __init__(self, first_s: float, seed: str) -> None:
        self._first_s = first_s
        self.pause_s = first_s
        """Next pause in seconds, before jitter."""
        self._jitter = random.Random(seed)  # noqa: S311  spreads load, not a secret

    def next_s(self) -> float:
        """Return the current pause in seconds, and lengthen the next."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, MAX_PAUSE_S)
        return pause_s * self._jitter.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again from the first pause, since the draft was useful."""
        self.pause_s = self._first_s
