"""Statistics of a completion, and of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What became of one source's guesses. A guess of several counts for the draft, else for the surest guesser."""

    name: str
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_failures: int = 0
    """Times that it raised or answered nonsense; the stream went on without it."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """The effect of speculation on one completion."""

    num_rounds: int = 0
    """Number of target passes that committed tokens."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_rounds: int = 0
    """Number of rounds with guesses to verify."""
    accepted_per_position: tuple[int, ...] = ()
    num_draft_failures: int = 0
    num_target_failures: int = 0
    num_lookup_tokens: int = 0
    """Number of the drafted tokens that were guessed without a draft model."""
    sources: tuple[SourceStats, ...] = ()
    """By name: those that guessed something, or failed."""
    num_relaxed_tokens: int = 0
    """Number of the accepted tokens that the exact rule would have rejected in their place."""
    num_continued: int = 0
    """Number of rounds that the target began by itself (`Continuation`)."""
    num_hits: int = 0
    """Number of verdicts whose next block was there already, or came in time."""
    num_misses: int = 0
    """Number of verdicts without nodes below them, though the draft had told of some."""
    draft_time_s: float = 0.0
    """Of the draft's passes behind verification, and of blocks in turn from asking to having them."""
    hidden_draft_time_s: float = 0.0
    """The part of it during which the target was verifying for the same stream."""

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        num_asked = self.num_hits + self.num_misses
        return self.num_hits / num_asked if num_asked else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine, for health, metrics and tests."""

    num_sessions: int
    num_jobs: int
    num_waiting: int
    """Number of jobs without KV: they wait for room, or for a grammar or a prefix that is being made."""
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_rows: int
    num_eager_steps: int
    """Number of steps that were to run compiled and did not."""
    num_overruns: int
    """Number of passes that took longer than those of the hardware in `paced_as`."""
    num_preemptions: int
    num_adopted_tokens: int
    """Number of prompt tokens whose KV was shared from other sessions."""
    step_time_s: float
    """Seconds spent in steps: forward passes, sampling, verification and bookkeeping."""
    forward_time_s: float
    """Seconds of these that were spent in forward passes."""
