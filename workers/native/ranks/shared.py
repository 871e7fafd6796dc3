"""What native code of several processes shares: numbers that they exchange, and where they wait for each other.

Knows memory; must not know who shares it, nor how it came to be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

PART: Final = 1 << 18
"""Numbers of a rank that are exchanged at once. There are two such parts of each rank, used in turn."""
RANK, NUM_RANKS, NUM_THREADS, BARRIER, ROUNDS, LOST, LIMIT_S = range(7)
"""Columns of `Exchange.state`: the rank and how many there are, threads of all of them, the address of the counter by
which they wait, how often they have met, whether the group is lost, and how long they wait for each other."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's view."""

    numbers: NDArray[np.float32]
    """Of all ranks.  # [2 * ranks * PART]"""
    state: NDArray[np.int64]

    def lose(self) -> None:
        """Let this rank's threads wait for nobody any more: what they compute is worthless."""
        self.state[LOST] = 1

    @property
    def is_lost(self) -> bool:
        return bool(self.state[LOST])


ALONE: Final = Exchange(np.zeros(1, np.float32), np.array([0, 1, 1, 0, 0, 0, 0], np.int64))
"""Of a process that shares nothing."""
