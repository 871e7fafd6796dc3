"""Memory that native code of several processes shares, to exchange numbers and to wait for each other.

Knows memory; must not know who shares it, nor how it came to be shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

PART: Final = 1 << 18
"""Numbers of a rank that are exchanged at once. There are two such parts of each rank, used in turn."""
RANK, NUM_RANKS, NUM_THREADS, MEETING, ROUNDS, LIMIT_S = range(6)
"""Columns of `Exchange.state`: the rank and how many there are, threads of all of them, the address of
`Exchange.meeting`, how often they have met, and how long they wait for each other."""
ARRIVED, LOST = range(2)
"""Words of `Exchange.meeting`: how many threads have arrived, all meetings together, and whether the group is lost."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's view."""

    numbers: NDArray[np.float32]
    """The numbers that all ranks exchange.  # [2 * ranks * PART]"""
    meeting: NDArray[np.int64]
    """Shared by all ranks: one that no longer waits overwrites what others still read, so all must know of it."""
    state: NDArray[np.int64]

    def lose(self) -> None:
        """Let no rank's threads wait for others any more: what they compute is worthless."""
        self.meeting[LOST] = 1

    @property
    def is_lost(self) -> bool:
        return bool(self.meeting[LOST])


ALONE: Final = Exchange(np.zeros(1, np.float32), np.zeros(2, np.int64), np.array([0, 1, 1, 0, 0, 0], np.int64))
"""The exchange of a process that shares nothing."""
