"""Forecasts of when a place is free, from how far the completions in progress are and how long earlier ones took.

Pure. Knows times and counts; must not know callers or the queue's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace

RECENT_COMPLETIONS = 16
"""Completions over which the time that a place is taken is averaged."""


class PlaceTimes:
    """For how long completions have their places."""

    def __init__(self) -> None:
        self.average_s = 0.0
        """0 before one has ended."""

    def ended(self, place_s: float) -> None:
        """A completion had its place for `place_s`."""
        self.average_s += (place_s - self.average_s) / RECENT_COMPLETIONS if self.average_s else place_s

    def left_s(self, age_s: float, num_tokens: int, num_left: int) -> float:
        """How much longer a completion of this age will have its place: to its usual length, if its own pace allows
        that, and not beyond `num_left` tokens.

        One that has none yet, or is older than usual, is expected to take as long again.
        """
        usual_s = self.average_s - age_s if age_s < self.average_s else age_s
        if not num_tokens:
            return usual_s
        longest_s = age_s * num_left / num_tokens
        return min(longest_s, usual_s) if self.average_s else longest_s


def until_free_s(left_s: Iterable[float], place_s: float, num_before: int, num_places: int) -> float:
    """Until a call has `num_places` at once, behind `num_before` places of others, each of them taken for `place_s`.

    `left_s`: until each place is free.
    """
    ends_s = list(left_s)
    heapify(ends_s)
    free_s = 0.0
    for _ in range(num_before + num_places):
        free_s = ends_s[0]
        heapreplace(ends_s, free_s + place_s)
    return free_s
