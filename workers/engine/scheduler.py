"""Who is in the next step, and with how many rows.

Decoding comes first and whole: its rows are few, and every one of them is a stream that waits. Prefill takes what is
left of the step, in chunks while anything is decoding, so that a long prompt never stalls the others. Among equals what
is urgent goes before what is only prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.config import DECODE_TOKENS, MIN_CHUNK_TOKENS


class Schedulable(Protocol):
    """Work on one sequence."""

    @property
    def pending(self) -> Sequence[int]:
        """Tokens still to be computed."""
        ...

    @property
    def num_tree_rows(self) -> int:
        """Guesses that go with the last of them; at least one where no token is pending."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Whether a round waits for it."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether earlier steps have taken a part of it."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """A job's part of one step: its next `num_tokens` tokens, and its guesses with the last of them."""

    index: int
    num_tokens: int
    is_last: bool


def plan(jobs: Sequence[Schedulable], max_rows: int, chunk_rows: Callable[[int], int]) -> list[Share]:
    """Shares of the next step: decoding first, then what is urgent, then by age. Never empty when there are jobs.

    A step has `max_rows` rows; beside so many that decode, prefill takes `chunk_rows` of them at most. It always gets a
    few, so that no prompt waits for ever while others fill each step.
    """
    by_urgency = sorted(range(len(jobs)), key=lambda index: not jobs[index].is_urgent)
    decoding = [index for index in by_urgency if _is_decoding(jobs[index])]
    prefilling = [index for index in by_urgency if not _is_decoding(jobs[index])]
    shares, rows_left = _whole(decoding, jobs, max_rows, MIN_CHUNK_TOKENS if prefilling else 0)
    if shares and prefilling:
        rows_left = min(rows_left, chunk_rows(max_rows - rows_left))
    return shares + _chunks(prefilling, jobs, rows_left)


def _is_decoding(job: Schedulable) -> bool:
    """The end of a prompt that went in chunks is none, or a step would take longer with it than with any of them; but a
    last few tokens are, so that the guesses which go with them need not find room in a chunk."""
    return len(job.pending) <= (MIN_CHUNK_TOKENS if job.has_begun else DECODE_TOKENS)


def _whole(
    indices: Iterable[int], jobs: Sequence[Schedulable], rows_left: int, reserve: int
) -> tuple[list[Share], int]:
    """As many as leave `reserve` rows, and one at least; and how many rows are left."""
    shares: list[Share] = []
    for index in indices:
        job = jobs[index]
        num_rows = len(job.pending) + job.num_tree_rows
        if num_rows > rows_left - reserve and shares:
            break
        shares.append(Share(index, len(job.pending), is_last=True))
        rows_left -= num_rows
    return shares, max(0, rows_left)


def _chunks(indices: Iterable[int], jobs: Sequence[Schedulable], rows_left: int) -> list[Share]:
    shares: list[Share] = []
    for index in indices:
        job = jobs[index]
        if rows_left <= 0:
            break
        fits_whole = len(job.pending) + job.num_tree_rows <= rows_left
        # The guesses go with the last token, so a chunk that cannot take both leaves at least one token for later.
        num_tokens = len(job.pending) if fits_whole else min(rows_left, len(job.pending) - 1)
        shares.append(Share(index, num_tokens, is_last=fits_whole))
        rows_left -= num_tokens + (job.num_tree_rows if fits_whole else 0)
    return shares
