"""Makes forward passes last as long as those of another model on other hardware, by sleeping.

Knows a model of pass times and the clock; must not know the computation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from core.costs import PASS_LAWS, PassLaw

logger = logging.getLogger(__name__)

WAKE_UP_S = 100e-6
"""Usual delay at the end of a sleep (Linux: 50 us of timer slack plus the thread switch); sleeps are shortened by it.

On two busy cores, waits of 1 to 25 ms end 0.03 ms late at the median and 0.12 ms at p90 (without it 0.12 and 0.21 ms).
A wait costs 0.05 ms of processor time."""


class Pacer:
    """Prolongs an engine's passes to the duration that the model of pass times gives."""

    def __init__(
        self,
        name: str,
        law: PassLaw,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.num_overruns = 0
        """Number of passes that took longer than the model of pass times gives."""
        self._law = law
        self._clock = clock
        self._sleep = sleep

    @classmethod
    def named(cls, name: str) -> Pacer:
        return cls(name, PASS_LAWS[name])

    def lasts_s(self, num_rows: int, took_s: float) -> float:
        """Duration in seconds, including the wait, of a pass that takes `took_s` to compute."""
        return max(took_s, self._law(num_rows))

    def wait(self, num_rows: int, began_s: float) -> None:
        """Wait until a pass of `num_rows` rows that began at `began_s` may end; return at once if it took longer."""
        end_s = began_s + self._law(num_rows)
        self.num_overruns += self._clock() > end_s
        while (left_s := end_s - self._clock()) > 0:
            self._sleep(max(0.0, left_s - WAKE_UP_S))

    def warn_of_overruns(self, step_times_s: Iterable[tuple[int, float]]) -> None:
        """Log which of the steps timed at start take longer on this machine than the model of pass times gives."""
        too_long = [str(num_rows) for num_rows, took_s in step_times_s if took_s > self._law(num_rows)]
        if too_long:
            logger.warning(
                "paced as %s, but steps of %s rows take longer on this machine", self.name, ", ".join(too_long)
            )
