"""One request as seen by its caller; times are in seconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from outrider_client import Speculation


class RequestOutcome(StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """Cancelled by this program (--cancel-share)."""
    REFUSED = "refused"
    """Refused by the service, for lack of capacity or quota."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int
    cancel_after_tokens: int | None = None
    """Tokens of output after which the caller cancels; None for never."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts that the end of a stream reports."""

    drafted_tokens: int
    accepted_tokens: int
    target_passes: int

    @classmethod
    def of(cls, stats: Speculation) -> Counts:
        return cls(stats.drafted_tokens, stats.accepted_tokens, stats.target_passes)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece of a stream, as it arrived."""

    num_tokens: int
    prompt_tokens: int
    counts: Counts | None = None
    """Only in the last piece, if the server reports them."""


@dataclass(slots=True)
class RequestRecord:
    index: int
    intended_s: float
    """Scheduled time; all latencies count from here, so that they include delays of the client and queueing."""
    sent_s: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """Arrival time and number of tokens of each piece that has tokens."""
    ended_s: float = 0.0
    outcome: RequestOutcome = RequestOutcome.FAILED
    error: str = ""
    prompt_tokens: int = 0
    counts: Counts | None = None

    def observe(self, now_s: float, piece: Arrival) -> None:
        """Record a piece that arrived at `now_s`."""
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        self.counts = piece.counts or self.counts
        if piece.num_tokens:
            self.pieces.append((now_s, piece.num_tokens))

    @property
    def output_tokens(self) -> int:
        return sum(num for _, num in self.pieces)

    @property
    def lateness_s(self) -> float:
        """Delay of this program in sending the request."""
        return self.sent_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token (TTFT); None without one."""
        return self.pieces[0][0] - self.intended_s if self.pieces else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latency (ITL): the pauses between pieces, which may have several tokens each."""
        times = [at_s for at_s, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token (TPOT) after the first piece; None if there is only one piece."""
        if len(self.pieces) < 2:
            return None
        (first_s, num_first), (last_s, _) = self.pieces[0], self.pieces[-1]
        return (last_s - first_s) / (self.output_tokens - num_first)
