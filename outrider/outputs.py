"""Results of a batch, as plain frozen records."""

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
    """Index among the `n` outputs of the prompt."""
    text: str
    token_ids: tuple[int, ...]
    is_guess: tuple[bool, ...]
    """For each token id: whether it was an accepted guess rather than a token sampled by the target."""
    finish_reason: FinishReason
    """"stop" or "length"."""
    matched_stop: str | int | None
    """Stop string or token id that ended the output; None after an end-of-sequence token or at the token limit."""
    seed: int
    """This seed with `n=1` reproduces the output."""
    logprobs: tuple[TokenLogprobs, ...]
    """One entry per token id; empty unless requested."""
    stats: SpeculationStats
    """Statistics of speculative decoding for this output."""
    explanation: tuple[str, ...] = ()
    """One line per round, explaining its decisions; empty unless requested."""
    receipt: Mapping[str, Any] | None = None
    """Everything that determines the output, if requested; saved as JSON, it is the input of `outrider replay`."""
    score: float | None = None
    """Log probability over length ** length_penalty, by which a beam search ranks its outputs; None for a sample."""
    problem: str | None = None
    """Why a grammar or bad words allowed no further token; None otherwise."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of a prompt; `text`, `token_ids` and `finish_reason` refer to the first."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, str]]
    """The prompt, as passed by the caller."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """One entry per prompt token except the first; empty unless requested."""

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
    """Build an output from a complete stream; its last chunk has a finish reason."""
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
        last.score,
        str(last.problem) if last.problem is not None else None,
    )
