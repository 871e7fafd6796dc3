"""What a batch gives back: plain frozen records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.records import Chunk, FinishReason, GenerationRequest, SpeculationStats, TokenLogprobs
from deploy.receipts import receipt_fields


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a prompt."""

    index: int
    """Which of `n`."""
    text: str
    token_ids: tuple[int, ...]
    is_guess: tuple[bool, ...]
    """For each id: whether it had been guessed (else it is the target's own)."""
    finish_reason: FinishReason
    """"stop" or "length"."""
    matched_stop: str | int | None
    """The stop string or token id that ended it; None for an end-of-sequence token or the limit."""
    seed: int
    """With it, `n=1` gives this output again."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each id if they were asked for, else none."""
    stats: SpeculationStats
    """What speculation did for it."""
    explanation: tuple[str, ...] = ()
    """Why its rounds were what they were, a line each, if that was asked for."""
    receipt: Mapping[str, Any] | None = None
    """Everything that determined it, if that was asked for: as JSON it is a file for `outrider replay`."""
    problem: str | None = None
    """Why no further token was possible, where a grammar or bad words left none."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of a prompt; `text`, `token_ids` and `finish_reason` are those of the first."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, str]]
    """As it was given."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """If they were asked for: of each token of the prompt but the first."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


def to_output(index: int, request: GenerationRequest, chunks: Sequence[Chunk]) -> Output:
    """The whole of one stream, whose last chunk has a finish reason."""
    last = chunks[-1]
    assert last.finish_reason is not None, "a stream without a last chunk raises"
    return Output(
        index,
        "".join(chunk.text for chunk in chunks),
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        tuple(is_guess for chunk in chunks for is_guess in chunk.is_guess),
        last.finish_reason,
        last.matched_stop,
        request.sampling.seed,
        tuple(each for chunk in chunks for each in chunk.logprobs),
        last.stats or SpeculationStats(),
        tuple(line for chunk in chunks for line in chunk.explanation),
        receipt_fields(last.receipt) if last.receipt is not None else None,
        str(last.problem) if last.problem is not None else None,
    )
