"""What an engine says of itself; no torch is needed to read it."""

from __future__ import annotations

from dataclasses import dataclass


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
