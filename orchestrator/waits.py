"""Forecasts of when a place becomes free, from the progress of running completions and the lengths of earlier ones.

Pure. Knows times and counts; must not know callers or the queue's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace

RECENT_COMPLETIONS = 16
"""Number of completions over which times and lengths are averaged."""


class PlaceTimes:
    """Estimates how long completions occupy their places."""

    def __init__(self) -> None:
        self.average_s = 0.0
        """Average seconds; 0 before the first completion has ended, like the other averages."""
        self._num_tokens = self._max_tokens = 0.0

    def ended(self, place_s: float, num_tokens: int, max_tokens: int) -> None:
        """Record a completion that took `place_s` seconds for `num_tokens` of at most `max_tokens`."""
        share = 1 / RECENT_COMPLETIONS if self._max_tokens else 1.0
        self.average_s += share * (place_s - self.average_s)
        self._num_tokens += share * (num_tokens - self._num_tokens)
        self._max_tokens += share * (max_tokens - self._max_tokens)

    def left_s(self, age_s: float, num_tokens: int, max_tokens: int) -> float:
        """Return the expected remaining seconds of a completion, after `num_tokens` of at most `max_tokens`.

        Assumes that it continues at its own pace up to the usual share of `max_tokens`, and that one which is already
        longer doubles in length. Without tokens yet, it takes as long as earlier ones did, or twice its present age.
        """
        if not num_tokens:
            return self.average_s - age_s if age_s < self.average_s else age_s
        expected = self._expected_tokens(max_tokens)
        num_left = expected - num_tokens if num_tokens < expected else min(max_tokens - num_tokens, num_tokens)
        return age_s * num_left / num_tokens

    def _expected_tokens(self, max_tokens: int) -> float:
        """Return the expected length of an output.

        The larger of the usual share of the limit, since callers that set a limit come near it, and the average length
        of earlier outputs.
        """
        if not self._max_tokens:
            return max_tokens
        return min(max_tokens, max(self._num_tokens, max_tokens * self._num_tokens / self._max_tokens))


def until_free_s(left_s: Iterable[float], place_s: float, num_before: int, num_places: int) -> float:
    """Return the seconds until `num_places` are free at once, after `num_before` other places are taken for `place_s`
    each.

    `left_s`: seconds until each place is free.
    """
    ends_s = list(left_s)
    heapify(ends_s)
    free_s = 0.0
    for _ in range(num_before + num_places):
        free_s = ends_s[0]
        heapreplace(ends_s, free_s + place_s)
    return free_s
