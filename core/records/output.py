"""The output of a stream, as a client receives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import InvalidRequest
from core.records.engine import TokenLogprobs
from core.records.receipt import Receipt
from core.records.statistics import SpeculationStats
from core.records.trace import CallTrace


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and output so far. Resumed tokens count as output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Number of prompt tokens whose KV came from the prefix cache when the target admitted the stream, in whole blocks.
    Prefix cache hits on a later target are not counted."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. Text may lag behind the ids while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    is_guess: tuple[bool, ...]
    """For each id: True for an accepted guess, False for the target's correction or bonus token."""
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    stats: SpeculationStats | None = field(default=None)
    """Only in the last chunk."""
    trace: tuple[CallTrace, ...] = ()
    """Calls answered since the last chunk, if requested."""
    output: int = 0
    """Index among the outputs of a beam search."""
    score: float | None = None
    """Only in the last chunk of an output of a beam search: its log probability over its length to the power of the
    length penalty."""
    began_s: float | None = None
    """Start of the stream on the orchestrator's clock, if the trace is requested. Times in `trace` count from here."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Only in the first chunk, if requested: one for each prompt token but the first."""
    explanation: tuple[str, ...] = ()
    """Reasons for the decisions since the last chunk, one per line, if requested."""
    receipt: Receipt | None = None
    """Only in the last chunk, if requested."""
    problem: InvalidRequest | None = None
    """Only in the last chunk: why the request's constraints allowed no further token. The finish reason is then LENGTH,
    because the output is cut short."""
