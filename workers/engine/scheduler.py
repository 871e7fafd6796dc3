"""The jobs of the next step, and their numbers of rows.

Decoding comes first and is never split: its rows are few, and a stream waits for each. Prefill takes the rest of the
step, in chunks while any session decodes, so that a long prompt does not stall other streams. Among equals, urgent jobs
come first.

Decoding sessions wait for the whole step. The cost of more rows depends on the device: on a GPU hundreds are nearly
free, on a CPU eight may double a step. It is therefore measured, and sets the size of a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from core.config import DECODE_TOKENS, MIN_CHUNK_TOKENS
from core.costs import PassCost
from workers.engine.jobs import Job, Share

PRIOR_S: Final = 0.01
RECOVERY_S: Final = 60.0
"""A step without memory takes about as long as one with: each minute one costs next to nothing."""
MAX_UNREAD: Final = 256
"""Number of passes kept: computing a chunk from them takes some milliseconds at most, within a longer step."""


def plan(jobs: Sequence[Job[Any]], max_rows: int, chunk_rows: Callable[[int], int]) -> list[Share]:
    """Shares of the next step: decoding first, then what is urgent, then by age. Never empty when there are jobs.

    A step has at most `max_rows` rows; `chunk_rows` gives the most rows of prefill beside a number of decoding rows.
    Prefill always gets a few rows, so that no prompt waits for ever while others fill each step.
    """
    by_urgency = sorted(jobs, key=lambda job: not job.is_urgent)
    decoding = [job for job in by_urgency if _is_decoding(job)]
    prefilling = [job for job in by_urgency if not _is_decoding(job)]
    shares, rows_left = _whole(decoding, max_rows, MIN_CHUNK_TOKENS if prefilling else 0)
    if shares and prefilling:
        rows_left = min(rows_left, chunk_rows(max_rows - rows_left))
    return shares + _chunks(prefilling, rows_left)


def _is_decoding(job: Job[Any]) -> bool:
    """Whether the job is decoding.

    The remainder of a chunked prompt is prefill, or its step would take longer than one with a chunk. Its last few
    tokens count as decoding, so that the guesses with them need no room in a chunk.
    """
    return len(job.pending) <= (MIN_CHUNK_TOKENS if job.has_begun else DECODE_TOKENS)


def _whole(jobs: Iterable[Job[Any]], rows_left: int, reserve: int) -> tuple[list[Share], int]:
    """The shares that leave `reserve` rows, at least one; and the number of rows left."""
    shares: list[Share] = []
    for job in jobs:
        share = Share(job, len(job.pending), is_last=True)
        num_rows = share.num_rows
        if num_rows > rows_left - reserve and shares:
            break
        shares.append(share)
        rows_left -= num_rows
    return shares, max(0, rows_left)


def _chunks(jobs: Iterable[Job[Any]], rows_left: int) -> list[Share]:
    shares: list[Share] = []
    for job in jobs:
        if rows_left <= 0:
            break
        is_whole = job.most_tokens >= len(job.pending)
        fits_whole = is_whole and len(job.pending) + job.num_tree_rows <= rows_left
        # The guesses go with the last token, so a chunk that cannot take both leaves at least one token for later.
        num_tokens = len(job.pending) if fits_whole else min(rows_left, job.most_tokens, len(job.pending) - 1)
        shares.append(Share(job, num_tokens, is_last=fits_whole))
        rows_left -= shares[-1].num_rows
    return shares


class RowLimit:
    """The most rows of a step: half of those for which there was no memory, and twice as many a minute later."""

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._changed_s = 0.0
        self._failed: Job[Any] | None = None
        """The job that the last step had alone, and no memory for."""
        self._is_exhausted = False
        """Whether there was no memory to begin a job, or one was to blame, and no step has been made since."""

    def made_step(self) -> None:
        """There was memory for a step."""
        self._failed, self._is_exhausted = None, False

    def recover(self, now_s: float) -> None:
        """Allow more again, if it has been kept to for long enough."""
        if self.rows < self._most and now_s >= self._changed_s + RECOVERY_S:
            self.rows, self._changed_s = min(2 * self.rows, self._most), now_s

    def take_less(self, shares: Sequence[Share], problem: str, now_s: float) -> Job[Any] | None:
        """After a step without memory: allow fewer rows, or return the job for which even that is too little.

        `shares` is empty where there was no memory to begin a job. Raises: MemoryError where all that came of the step
        before was such a job, or none either.
        """
        num_rows = sum(share.num_rows for share in shares)
        if shares and self.shrink(len(shares), num_rows, now_s):
            return None
        job = shares[0].job if shares else None
        if job is not None and self._failed is not job:  # once more, with all memory that others had kept
            self._failed = job
            return None
        if self._is_exhausted:
            raise MemoryError(f"no memory for any step: {problem}")
        self._is_exhausted = True
        return job

    def shrink(self, num_jobs: int, num_rows: int, now_s: float) -> bool:
        """Allow fewer rows than a step had for which there was no memory; returns whether that makes it smaller."""
        may_split = num_jobs > 1 or MIN_CHUNK_TOKENS < num_rows <= self.rows
        self.rows, self._changed_s = max(1, num_rows // 2) if may_split else self._most, now_s
        return may_split


class PrefillPace:
    """The largest chunk, of a few sizes, with which a step takes at most `stretch` times its duration without."""

    def __init__(self, stretch: float, max_rows: int) -> None:
        self._stretch = stretch
        self._sizes = [max_rows]
        while self._sizes[-1] > MIN_CHUNK_TOKENS:
            self._sizes.append(max(MIN_CHUNK_TOKENS, self._sizes[-1] // 2))
        self._cost = PassCost(PRIOR_S)
        self._unread: deque[tuple[int, float]] = deque(maxlen=MAX_UNREAD)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a pass of `num_rows` rows."""
        self._unread.append((num_rows, seconds))

    def chunk_rows(self, num_decoding: int) -> int:
        """Number of prefill rows that may join `num_decoding` decoding rows."""
        while self._unread:
            self._cost.observe(*self._unread.popleft())
        curve = self._cost.curve()
        limit_s = self._stretch * curve(num_decoding)
        return next((rows for rows in self._sizes if curve(num_decoding + rows) <= limit_s), self._sizes[-1])
