"""One request as its caller saw it; times are in seconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from outrider_client import Speculation


class Ending(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """By this program, as it was asked to."""
    REFUSED = "refused"
    """There was no place for it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks for."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int
    cancel_after_tokens: int | None = None
    """Tokens of output after which the caller goes away; None stays to the end."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a stream's end says of it, in either language of the API."""

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
    """In the last one, where the server reports them."""


@dataclass(slots=True)
class RequestRecord:
    """One request, filled in as its stream comes."""

    index: int
    intended_s: float
    """When the schedule had it sent; all latencies count from here, so that a late client or a queue hides nothing."""
    sent_s: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """Of each piece with tokens: when it came, and how many."""
    ended_s: float = 0.0
    outcome: Ending = Ending.FAILED
    error: str = ""
    prompt_tokens: int = 0
    counts: Counts | None = None

    def saw(self, now_s: float, piece: Arrival) -> None:
        """A piece has come."""
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        self.counts = piece.counts or self.counts
        if piece.num_tokens:
            self.pieces.append((now_s, piece.num_tokens))

    @property
    def output_tokens(self) -> int:
        return sum(num for _, num in self.pieces)

    @property
    def lateness_s(self) -> float:
        """By which this program was late itself."""
        return self.sent_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """To the first token."""
        return self.pieces[0][0] - self.intended_s if self.pieces else None

    @property
    def itl_s(self) -> list[float]:
        """Between pieces: the pauses that a reader sees. A piece may have several tokens."""
        times = [at_s for at_s, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """A token's share of the time from the first piece to the last; None where nothing follows the first."""
        if len(self.pieces) < 2:
            return None
        (first_s, num_first), (last_s, _) = self.pieces[0], self.pieces[-1]
        return (last_s - first_s) / (self.output_tokens - num_first)
