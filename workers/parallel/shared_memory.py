"""Memory that all ranks of a machine share: rank 0's commands, and what native code exchanges.

A broadcast wakes two threads of each process; here a command is read as soon as a waiting rank looks. Knows memory and
waiting; must not know commands or models.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from workers.native.ranks.shared import PART, Exchange

FOLDER: Final = Path("/dev/shm")  # noqa: S108  files there are memory
PREFIX: Final = "outrider-ranks-"
LINE: Final = 8
"""Words of a cache line."""
MEETING, SENT, FIRST_RANK = 0, LINE, 2 * LINE
"""Words: where native code meets, how many messages rank 0 has sent, and the first of a line for each rank."""
TAKEN, THREADS = range(2)
"""Words of a rank's line: the messages that it has read, and the threads of its native code."""
MESSAGE_INTS: Final = 1 << 16
"""A longer command is sent as several messages."""
SPIN_S: Final = 0.002
"""A waiting rank looks all the time for this long. Rank 0 of a busy engine takes less between two steps."""
PATIENCE: Final = 16
"""After that it sleeps for this part of the time that it has waited, and at most `LONGEST_SLEEP_S`."""
LONGEST_SLEEP_S: Final = 0.005


class SharedMemory:
    """One rank's view. Rank 0 creates it; the others open it by its path before it is unlinked."""

    def __init__(self, file: int, path: Path, rank: int, num_ranks: int) -> None:
        self.path, self._rank, self._num_ranks = path, rank, num_ranks
        memory = mmap.mmap(file, _num_bytes(num_ranks))
        num_words = FIRST_RANK + LINE * num_ranks
        self._words = np.frombuffer(memory, np.int64, num_words)
        self._message = np.frombuffer(memory, np.int32, 2 + MESSAGE_INTS, 8 * num_words)
        first = 8 * num_words + 4 * len(self._message)
        self._numbers = np.frombuffer(memory, np.float32, 2 * num_ranks * PART, first)

    @classmethod
    def create(cls, num_ranks: int) -> Self:
        """Raises: OSError if there is no such memory, or not enough.

        Its file is locked for as long as this process lives, so that the next group can tell what a killed one left.
        """
        if platform.machine() not in ("x86_64", "AMD64"):  # others may see a message's number before the message
            raise OSError("messages need a processor that keeps the order of stores")
        _delete_abandoned()
        file, name = _locked_file()
        try:
            os.posix_fallocate(file, 0, _num_bytes(num_ranks))
            return cls(file, Path(name), 0, num_ranks)
        except OSError:
            Path(name).unlink()
            raise
        finally:
            os.close(file)

    @classmethod
    def open(cls, path: Path, rank: int, num_ranks: int) -> Self:
        """Raises: OSError on another machine."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(file, path, rank, num_ranks)
        finally:
            os.close(file)

    def announce(self, num_threads: int) -> None:
        """Say how many threads this rank's native code has. All ranks do so before one calls `exchange`."""
        self._of_ranks[self._rank, THREADS] = num_threads

    def exchange(self, limit_s: float) -> Exchange:
        """Return what native code needs. Its threads wait for those of other ranks, about `limit_s` at most."""
        num_threads = int(self._of_ranks[:, THREADS].sum())
        meeting = self._words[MEETING : MEETING + LINE]
        state = [self._rank, self._num_ranks, num_threads, meeting.ctypes.data, 0, 1 + int(limit_s)]
        return Exchange(self._numbers, meeting, np.array(state, np.int64))

    def send(self, values: Sequence[int], check: Callable[[float], None]) -> None:
        """Send to all other ranks. `check`, called with the seconds waited so far, raises to end the wait."""
        for first in range(0, len(values), MESSAGE_INTS):
            message = values[first : first + MESSAGE_INTS]
            _wait_until(lambda: int(self._of_ranks[1:, TAKEN].min()) == self._words[SENT], check)
            self._message[: 2 + len(message)] = (len(values) - first, len(message), *message)
            self._words[SENT] += 1

    def receive(self, check: Callable[[float], None]) -> list[int]:
        """Wait for the next values that rank 0 sends. `check` as for `send`."""
        values: list[int] = []
        own, num_left = self._of_ranks[self._rank], 1
        while num_left:
            _wait_until(lambda: self._words[SENT] > own[TAKEN], check)
            num_left, length = self._message[:2].tolist()
            values += self._message[2 : 2 + length].tolist()
            num_left -= length
            own[TAKEN] += 1
        return values

    @property
    def _of_ranks(self) -> NDArray[np.int64]:
        """A line for each rank.  # [ranks, words]"""
        return self._words[FIRST_RANK:].reshape(self._num_ranks, LINE)


def _locked_file() -> tuple[int, str]:
    """Raises: OSError."""
    while True:
        file, name = tempfile.mkstemp(prefix=PREFIX, dir=FOLDER)
        fcntl.flock(file, fcntl.LOCK_SH)
        if Path(name).exists():  # another group may have taken it for an abandoned one before it was locked
            return file, name
        os.close(file)


def _delete_abandoned() -> None:
    """Delete the files that nobody has locked any more: their rank 0 was killed before all ranks had opened them."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or is gone by now
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def _num_bytes(num_ranks: int) -> int:
    return 8 * (FIRST_RANK + LINE * num_ranks) + 4 * (2 + MESSAGE_INTS) + 4 * 2 * num_ranks * PART


def _wait_until(is_done: Callable[[], bool], check: Callable[[float], None]) -> None:
    """Look all the time at first, then more and more rarely."""
    began_s = monotonic()
    while not is_done():
        waited_s = monotonic() - began_s
        if waited_s < SPIN_S:
            os.sched_yield()
        else:
            check(waited_s)
            sleep(min(waited_s / PATIENCE, LONGEST_SLEEP_S))
