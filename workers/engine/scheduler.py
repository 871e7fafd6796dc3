"""Chooses the jobs of the next step and their numbers of rows.

Decoding comes first and is never split: its rows are few, and a stream waits for each of them. Prefill gets the rest of
the step. While any session decodes, prefill is chunked, so that a long prompt does not stall other streams. Urgent jobs
come first among equals.

Decoding sessions wait for the whole step. The cost of extra rows depends on the device: hundreds are nearly free on a
GPU, while eight may double a step on a CPU. The cost is therefore measured, and determines the chunk size.
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
"""Seconds before a larger step is tried again. A failed step costs about as much as a normal one, so one a minute is
negligible."""
MAX_UNREAD: Final = 256
"""Number of recorded passes kept; computing a chunk size from them takes a few milliseconds of a longer step."""


def plan(jobs: Sequence[Job[Any]], max_rows: int, chunk_rows: Callable[[int], int]) -> list[Share]:
    """Shares of the next step: decoding first, then urgent jobs, then by age. Never empty if there are jobs.

    A step has at most `max_rows` rows. `chunk_rows` maps a number of decoding rows to the maximum number of prefill
    rows beside them. Prefill always gets a few rows, so that decoding never starves a prompt.
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

    The last part of a chunked prompt counts as prefill; otherwise its step would exceed the chunk size. Its last few
    tokens count as decoding, so that their guesses need no space in a chunk.
    """
    return len(job.pending) <= (MIN_CHUNK_TOKENS if job.has_begun else DECODE_TOKENS)


def _whole(jobs: Iterable[Job[Any]], rows_left: int, reserve: int) -> tuple[list[Share], int]:
    """Shares for whole jobs, at least one, that leave `reserve` rows; and the number of rows left."""
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
        is_whole = job.max_chunk_tokens >= len(job.pending)
        fits_whole = is_whole and len(job.pending) + job.num_tree_rows <= rows_left
        # Guesses are computed with the last token, so a chunk too small for both leaves at least one token.
        num_tokens = len(job.pending) if fits_whole else min(rows_left, job.max_chunk_tokens, len(job.pending) - 1)
        shares.append(Share(job, num_tokens, is_last=fits_whole))
        rows_left -= shares[-1].num_rows
    return shares


class RowLimit:
    """Maximum number of rows per step: halved after a step runs out of memory, doubled again a minute later."""

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._changed_s = 0.0
        self._failed: Job[Any] | None = None
        """Job that ran out of memory while alone in the last step."""
        self._is_exhausted = False
        """Whether, since the last completed step, a job could not start for lack of memory or was too large by
        itself."""

    def record_success(self) -> None:
        """Record that a step had enough memory."""
        self._failed, self._is_exhausted = None, False

    def recover(self, now_s: float) -> None:
        """Double the limit if it has held for `RECOVERY_S`."""
        if self.rows < self._most and now_s >= self._changed_s + RECOVERY_S:
            self.rows, self._changed_s = min(2 * self.rows, self._most), now_s

    def handle_out_of_memory(self, shares: Sequence[Share], problem: str, now_s: float) -> Job[Any] | None:
        """After a step ran out of memory: reduce the limit, or return the job that is too large by itself.

        `shares` is empty if memory ran out while a job was starting. Raises: MemoryError if that already happened, or a
        job was already returned, since the last completed step.
        """
        num_rows = sum(share.num_rows for share in shares)
        if shares and self.shrink(len(shares), num_rows, now_s):
            return None
        job = shares[0].job if shares else None
        if job is not None and self._failed is not job:  # retry once, with the memory that other jobs have freed
            self._failed = job
            return None
        if self._is_exhausted:
            raise MemoryError(f"no memory for any step: {problem}")
        self._is_exhausted = True
        return job

    def shrink(self, num_jobs: int, num_rows: int, now_s: float) -> bool:
        """Reduce the limit after a step ran out of memory; return whether the next step can be smaller."""
        may_split = num_jobs > 1 or MIN_CHUNK_TOKENS < num_rows <= self.rows
        self.rows, self._changed_s = max(1, num_rows // 2) if may_split else self._most, now_s
        return may_split


class PrefillPace:
    """Largest chunk, of a few sizes, that keeps a step within `stretch` times its duration without prefill."""

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
