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
    """Why a stream ended: by itself, or cut short."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and output so far; resumed tokens count as output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Number of the prompt's tokens whose KV the target had from others when it admitted the stream, in whole blocks;
    what a later target takes from its cache is not counted."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. Text may lag behind the ids while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    is_guess: tuple[bool, ...]
    """For each id: whether it was a guess (else it is the target's correction or bonus token)."""
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    stats: SpeculationStats | None = field(default=None)
    """In the last chunk."""
    trace: tuple[CallTrace, ...] = ()
    """The calls that were answered since the last chunk, when asked for."""
    began_s: float | None = None
    """When the stream began, on the orchestrator's clock, where calls are asked for: their times count from here."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first one, when asked for: of each token of the prompt but the first."""
    explanation: tuple[str, ...] = ()
    """Why the decisions since the last chunk were made, a line each, when asked for."""
    receipt: Receipt | None = None
    """In the last chunk, when asked for."""
    problem: InvalidRequest | None = None
    """In the last chunk: why no further token was possible, where the request's constraints left none. The finish
    reason is LENGTH then, since the output is cut short."""
