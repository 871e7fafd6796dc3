"""The number of prefill rows in a step in which other sessions decode.

Decoding sessions wait for the whole step. The cost of more rows depends on the device: on a GPU hundreds are nearly
free, on a CPU eight may double a step. It is therefore measured.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from core.config import MIN_CHUNK_TOKENS
from core.costs import PassCost

PRIOR_S: Final = 0.01
MAX_UNREAD: Final = 256
"""Number of passes kept: computing a chunk from them takes some milliseconds at most, within a longer step."""


class PrefillPace:
    """The largest chunk, of a few sizes, with which a step takes at most `stretch` times its duration without."""

    def __init__(self, stretch: float, max_rows: int) -> None:
        self._stretch = stretch
        self._sizes = [max_rows]
        while self._sizes[-1] > MIN_CHUNK_TOKENS:
            self._sizes.append(max(MIN_CHUNK_TOKENS, self._sizes[-1] // 2))
        self._cost = PassCost(PRIOR_S)
        self._unread: deque[tuple[int, float]] = deque(maxlen=MAX_UNREAD)

    def see(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a pass of `num_rows` rows."""
        self._unread.append((num_rows, seconds))

    def chunk_rows(self, num_decoding: int) -> int:
        """Number of prefill rows that may join `num_decoding` decoding rows."""
        while self._unread:
            self._cost.see(*self._unread.popleft())
        curve = self._cost.curve()
        limit_s = self._stretch * curve(num_decoding)
        return next((rows for rows in self._sizes if curve(num_decoding + rows) <= limit_s), self._sizes[-1])
