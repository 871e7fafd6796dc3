"""What a pass costs by its rows, as it is believed at one moment; hopeful where nothing was seen.

Knows seconds and rows; must not know how they were observed (`core.costs.engine_cost`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

MAX_EXPONENT = 1.0
"""Beyond what was seen a pass costs at most in proportion to its rows."""
MIN_EXPONENT = 0.07
"""And at least 5% more for twice the rows: hopeful, since only what is tried is learned."""
BELOW_EXPONENT = 0.5
"""Where a prompt's prefill is all that was seen, a narrower pass may cost in proportion to its rows, or as much."""
HOPE = 4.0
"""Hope ends at so many times what was seen; from there on a pass costs in proportion to its rows."""


class Curve:
    """Seconds of a pass by its rows, as believed at one moment; hopeful where nothing was seen."""

    def __init__(self, places: Sequence[float], seconds: Sequence[float]) -> None:
        self._places = tuple(places)
        self._seconds = tuple(seconds)
        self._known: dict[float, float] = {}

    def __call__(self, rows: float) -> float:
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._at(rows)
        return found

    def _at(self, rows: float) -> float:
        places, seconds = self._places, self._seconds
        if rows <= places[0]:
            exponent = self._exponent(0) if len(places) > 1 else BELOW_EXPONENT
            return seconds[0] * math.pow(rows / places[0], exponent)
        if rows >= places[-1]:
            beyond = rows / places[-1]
            hope = math.pow(min(beyond, HOPE), self._exponent(len(places) - 2))
            return seconds[-1] * hope * max(beyond / HOPE, 1.0)
        left = bisect_right(places, rows) - 1
        return self._line(left, left + 1, rows)

    def _line(self, first: int, second: int, rows: float) -> float:
        share = (rows - self._places[first]) / (self._places[second] - self._places[first])
        return self._seconds[first] + share * (self._seconds[second] - self._seconds[first])

    def _exponent(self, left: int) -> float:
        """Of the power law through two neighbouring knots, to go on beyond the ends."""
        places, seconds = self._places, self._seconds
        if len(places) < 2:
            return MIN_EXPONENT
        exponent = math.log(seconds[left + 1] / seconds[left]) / math.log(places[left + 1] / places[left])
        return min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)
