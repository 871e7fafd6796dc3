"""Statistics of a completion and of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Guesses of one source. A guess made by several sources counts for the draft, or else for the guesser with the
    highest chance.
    """

    name: str
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_failures: int = 0
    """Number of times the source raised or returned an invalid answer. The stream continued without it."""


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
    """Number of drafted tokens that were guessed without a draft model."""
    sources: tuple[SourceStats, ...] = ()
    """Sources that guessed or failed at least once, by name."""
    num_relaxed_tokens: int = 0
    """Number of accepted tokens that the exact rule would have rejected."""
    num_continued: int = 0
    """Number of rounds that the target started itself, from a `Continuation`."""
    num_hits: int = 0
    """Number of verdicts with a next block that was ready, or arrived in time."""
    num_misses: int = 0
    """Number of verdicts after which the tree had no nodes, although the draft had sent some before."""
    draft_time_s: float = 0.0
    """Seconds of draft passes during verification, plus seconds spent waiting for blocks drafted in turn."""
    hidden_draft_time_s: float = 0.0
    """Part of `draft_time_s` during which the target was verifying for the same stream."""

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        num_asked = self.num_hits + self.num_misses
        return self.num_hits / num_asked if num_asked else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine, for health, metrics and tests."""

    num_sessions: int
    num_jobs: int
    num_waiting: int
    """Number of jobs without KV: they wait for free blocks, a grammar, or a prefix that is being computed."""
    num_blocks: int
    num_free_blocks: int
    num_states: int
    """Number of states of recurrent layers; 0 for a model without such layers."""
    num_free_states: int
    num_steps: int
    num_rows: int
    num_eager_steps: int
    """Number of steps that should have run compiled but did not."""
    num_overruns: int
    """Number of passes that took longer than on the hardware named in `paced_as`."""
    num_preemptions: int
    num_adopted_tokens: int
    """Number of prompt tokens whose KV was shared with other sessions."""
    step_time_s: float
    """Seconds spent in steps: forward passes, sampling, verification and bookkeeping."""
    forward_time_s: float
    """Part of `step_time_s` spent in forward passes."""
    num_kept_tokens: int = 0
    """Number of output tokens that were written to the learning buffer."""
    num_unkept_tokens: int = 0
    """Number of those that could not be written."""

    @property
    def kv_use(self) -> float:
        """Share of KV blocks or of recurrent states in use, whichever is larger."""
        by_states = 1.0 - self.num_free_states / self.num_states if self.num_states else 0.0
        return max(by_states, 1.0 - self.num_free_blocks / max(1, self.num_blocks))
