"""What is counted of a completion, and of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one completion."""

    num_rounds: int = 0
    """Target passes that committed tokens."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_rounds: int = 0
    """Rounds that had guesses to verify."""
    accepted_per_position: tuple[int, ...] = ()
    num_draft_failures: int = 0
    num_target_failures: int = 0
    num_lookup_tokens: int = 0
    """Of the drafted tokens, those that were looked up in the text so far, without a draft model."""
    num_continued: int = 0
    """Rounds that the target went on with by itself (`Continuation`)."""
    num_hits: int = 0
    """Verdicts whose next block had been prepared before they came, or came in time."""
    num_misses: int = 0
    """Verdicts below which nothing had grown, though the draft had told of something."""
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
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_rows: int
    num_eager_steps: int
    """Steps that were to be compiled and are not."""
    num_overruns: int
    """Passes that took longer than what the engine is paced as."""
    num_preemptions: int
    num_adopted_tokens: int
    """Tokens of prompts whose KV was there from others."""
    step_time_s: float
    """Time spent in steps: forward passes, sampling, verification and bookkeeping."""
    forward_time_s: float
    """The part of it that was spent in forward passes."""
