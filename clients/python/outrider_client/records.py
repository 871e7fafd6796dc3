"""A server's replies as frozen dataclasses: the messages of outrider.v1 in Python types.

Knows nothing of gRPC or protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Unknown = Literal["unknown"]
"""Stands for an enum value that this client does not know, for example from a newer server."""
FinishReason = Literal["stop", "length"]
Verification = Literal[
    "coupled",
    "rejection",
    "block",
    "lenient_coupled",
    "lenient_rejection",
    "typical",
    "recursive_rejection",
    "sequential_selection",
]
"""The lenient rules and `typical` are relaxed: their output does not have the target's distribution."""
ServiceTier = Literal["default", "flex", "priority"]
"""Named priorities: `flex` is admitted after others, `priority` before them."""
Call = Literal["verify", "block", "growth", "prefill"]
"""Kind of a call to an engine. `verify`: the target checks a block; without guesses, a prefill or a plain step.
`block`: the draft guesses the next block while the target waits. `growth`: the draft grows its tree while the target
verifies. `prefill`: the draft catches up with the tokens so far."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens so far."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of output, resumed ones included."""
    cached_tokens: int = 0
    """Prompt tokens found in the server's prefix cache: the minimum over all samples; for a resumed stream, those of
    its last call."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, and those of the likeliest alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class Source:
    """Statistics of one source of guesses: the draft, or a guesser that needs no model."""

    name: str
    drafted_tokens: int
    accepted_tokens: int
    failures: int
    """Number of errors or invalid answers; the stream went on without the source."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Statistics of speculation for a stream, since it was last resumed."""

    target_passes: int
    draft_passes: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    draft_failures: int
    target_failures: int
    hits: int
    """Number of verdicts whose next block was prepared while the target was verifying."""
    misses: int
    draft_time_s: float
    hidden_draft_time_s: float
    """The part of `draft_time_s` during which the target was verifying for this stream."""
    lookup_tokens: int
    """Number of the drafted tokens that were guessed without a draft model."""
    continued_passes: int
    """Number of target passes that the target began by itself, without a message for them."""
    sources: tuple[Source, ...]
    """Sources that made a guess or failed, sorted by name."""
    relaxed_tokens: int
    """Number of accepted tokens that the exact rule would have rejected. Only with relaxed rules."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended."""

    reason: FinishReason | Unknown
    matched: str | int | None
    """The stop string or stop token id that ended the stream; None for an end-of-sequence token or the limit.

    The token that ended the stream is always the last of `token_ids` and counted in `usage`.
    """
    seed: int
    """The same request with this seed gives the same output with greedy decoding, with coupled verification, and with
    `max_draft_tokens=0`. With rejection or block verification and drafting on, it may give another output of the same
    distribution; with a relaxed rule, any output that the rule allows."""
    speculation: Speculation | None
    receipt: Mapping[str, Any] | None = None
    """With `receipt=True`: everything that determined the output, as the JSON form of the proto's Receipt."""
    problem: str | None = None
    """Why no further token was possible, if the request's own constraints allowed none; the reason is then "length"."""
    score: float | None = None
    """Set by a beam search: the output's log probability over its length to the power of the length penalty."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The engine's timing of a call."""

    waited_s: float
    """Seconds from the call's arrival to the beginning of its first step."""
    computed_s: float
    """Seconds from the beginning of its first step to the end of its last."""
    passes: int
    rows: int
    """Number of rows in those passes, other streams included."""


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """A verified block and its verdict."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """For each guess the index of its parent, or -1 for the last committed token."""
    sources: tuple[str, ...]
    """For each guess the name of its source."""
    path: tuple[int, ...]
    """Indices of the accepted guesses, from the root down."""
    next_token_id: int
    """The token that the target added after the accepted guesses. Not in the output if that ended before it."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One answered call of a stream to an engine."""

    call: Call | Unknown
    sent_s: float
    """Seconds since the stream began, by the server's clock. The same holds for `received_s`."""
    received_s: float
    guesses: int
    """Number of nodes verified or grown."""
    used: int
    """For a verification: number of accepted nodes. For growth: number of nodes in the next block, if this was the last
    call before it."""
    timing: Timing | None
    """None if the engine did not report it."""
    verified: VerifiedBlock | None = None
    """Only for a verification."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream."""

    text: str
    """Text that is complete with these tokens. An incomplete character or a possible stop string comes with a later
    chunk."""
    token_ids: tuple[int, ...]
    guessed: tuple[bool, ...]
    """For each id: True for an accepted guess, False for the target's own token."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each id, if requested."""
    usage: Usage
    finish: Finish | None
    """Only in the last chunk."""
    trace: tuple[CallTrace, ...] = ()
    """With `trace=True`: calls answered since the last chunk."""
    index: int = 0
    """Index of the sample, below `n`. Each sample has its own last chunk; `usage` covers all samples."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token except the first, if requested. Only in the first chunk."""
    explanation: tuple[str, ...] = ()
    """With `explain=True`: reasons of the decisions since the last chunk, one a line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several outputs of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    guessed: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish
    trace: tuple[CallTrace, ...]
    explanation: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole stream."""

    text: str
    token_ids: tuple[int, ...]
    guessed: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    finish: Finish
    trace: tuple[CallTrace, ...]
    """With `trace=True`: all calls."""
    request_id: str
    """Name of the request in the server's logs."""
    num_calls: int
    """Number of calls: 1, plus 1 for each retry."""
    samples: tuple[Sample, ...] = ()
    """All samples in order; without `n` there is one. The fields above, except usage, are those of the first."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token except the first, if requested."""
    explanation: tuple[str, ...] = ()
    """With `explain=True`: reasons of the decisions of the stream, one a line."""


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded model: a target or a draft."""

    name: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    vocab_size: int
    max_context_tokens: int
    kv_cache_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One model that requests can name."""

    name: str
    max_context_tokens: int
    """Limit of prompt and output together."""
    vocab_size: int
    has_draft: bool
    adapter_of: str = ""
    """Name of the model whose weights this LoRA adapter changes; empty for a model."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of unset sampling fields."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True, slots=True)
class Control:
    """Estimates and decisions of the orchestrator that answered."""

    policy: str
    sessions: int
    draft_tokens: int
    """Depth of a block in tokens; 0 while drafting is off."""
    block_tokens: int
    reason: str
    """Reason of the last change."""
    acceptance: tuple[float, ...]
    hit_rate: float
    verify_s: Mapping[int, float]
    """Estimated seconds of a target pass, by number of rows."""
    draft_s: Mapping[int, float]
    wire_s: float
    changes: int
    branch_s: float
    """Estimated seconds that each branch of a block adds to a target pass, on top of its rows."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served target and its draft."""

    model: str
    target: Model
    draft: Model | None
    """None if the target is served without a draft."""
    max_draft_tokens: int
    verification: Verification | Unknown
    sampling_defaults: SamplingDefaults
    control: Control | None
    """None if the orchestrator does not report it."""
