"""Forecasts of when a place is free, from how far the completions in progress are and how long earlier ones became.

Pure. Knows times and counts; must not know callers or the queue's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace

RECENT_COMPLETIONS = 16
"""Completions over which times and lengths are averaged."""


class PlaceTimes:
    """For how long completions have their places."""

    def __init__(self) -> None:
        self.average_s = 0.0
        """0 before one has ended; so the other averages."""
        self._num_tokens = self._max_tokens = 0.0

    def ended(self, place_s: float, num_tokens: int, max_tokens: int) -> None:
        """A completion had its place for `place_s`, and made `num_tokens` of at most `max_tokens`."""
        share = 1 / RECENT_COMPLETIONS if self._max_tokens else 1.0
        self.average_s += share * (place_s - self.average_s)
        self._num_tokens += share * (num_tokens - self._num_tokens)
        self._max_tokens += share * (max_tokens - self._max_tokens)

    def left_s(self, age_s: float, num_tokens: int, max_tokens: int) -> float:
        """How much longer a completion will have its place, after `num_tokens` of at most `max_tokens`.

        It goes on at its own pace, to a length as usual beside `max_tokens`; one that is longer already becomes twice
        as long. Without tokens it takes as long as others did, or twice as long as it has taken.
        """
        if not num_tokens:
            return self.average_s - age_s if age_s < self.average_s else age_s
        expected = self._expected_tokens(max_tokens)
        num_left = expected - num_tokens if num_tokens < expected else min(max_tokens - num_tokens, num_tokens)
        return age_s * num_left / num_tokens

    def _expected_tokens(self, max_tokens: int) -> float:
        """A share of its limit as usual: callers that set one come near it. At least as much as others made: of those
        that may fill the context none does.
        """
        if not self._max_tokens:
            return max_tokens
        return min(max_tokens, max(self._num_tokens, max_tokens * self._num_tokens / self._max_tokens))


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
