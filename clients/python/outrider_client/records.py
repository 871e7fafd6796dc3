"""What a server answers, as plain frozen records: the messages of outrider.v1 in Python's own types.

Knows nothing of gRPC or protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Unknown = Literal["unknown"]
"""In place of a value that this client has no name for, as a newer server may send: the rest of the reply stands."""
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
"""The lenient ones and `typical` are relaxed rules, whose output has not the target's own law."""
ServiceTier = Literal["default", "flex", "priority"]
"""Names for priorities: `flex` is served after others, `priority` before them."""
Call = Literal["verify", "block", "growth", "prefill"]
"""The kind of a call to an engine: the target is asked to verify (with no guesses: prefill, or a plain step); the draft
to guess the next block while the target waits, to grow on while it verifies, or to catch up with the tokens so far."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens so far."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of output, resumed ones included."""
    cached_tokens: int = 0
    """Of the prompt's tokens, those that the server had in its cache from others: of several samples the least,
    of a stream that was resumed what its last call found."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token that was output, and of the likeliest ones in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), the likeliest first."""


@dataclass(frozen=True, slots=True)
class Source:
    """What became of the guesses of one source: the draft, or a guesser that needs no model."""

    name: str
    drafted_tokens: int
    accepted_tokens: int
    failures: int
    """Times that it raised or answered nonsense; the stream went on without it."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The effect of speculation on a stream, since its last resumption."""

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
    """By name: those that guessed something, or failed."""
    relaxed_tokens: int
    """Number of the accepted tokens that the exact rule would have rejected: of relaxed rules alone."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended."""

    reason: FinishReason | Unknown
    matched: str | int | None
    """The stop string or stop token id that ended it; None for an end-of-sequence token or the limit.

    The token that ended it is the last of `token_ids`, and counted in `usage`, whichever it was.
    """
    seed: int
    """With this seed the same request gives the same output: when greedy, with coupled verification, or with
    `max_draft_tokens=0`. With rejection or block verification and drafting on it gives another of the same law, with a
    relaxed rule any other that the rule allows."""
    speculation: Speculation | None
    receipt: Mapping[str, Any] | None = None
    """With `receipt=True`: everything that determined the output, as JSON has the proto's Receipt."""
    problem: str | None = None
    """Why no further token was possible, where the request's own constraints left none; the reason is "length" then."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The engine's timing of a call."""

    waited_s: float
    """Seconds from its arrival to the beginning of its first step."""
    computed_s: float
    """Seconds from there to the end of its last step."""
    passes: int
    rows: int
    """Number of rows of those passes, those of other streams included."""


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """What the target verified, and what it said of it."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """For each guess the index of its parent, or -1 for the token that was committed last."""
    sources: tuple[str, ...]
    """For each guess who made it."""
    path: tuple[int, ...]
    """Indices of the accepted guesses, in their order."""
    next_token_id: int
    """The token that the target added after the accepted guesses. Not in the output if that ended before it."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One answered call of a stream to an engine."""

    call: Call | Unknown
    sent_s: float
    """Seconds since the stream began, on the server's clock, as is `received_s`."""
    received_s: float
    guesses: int
    """Number of nodes verified or grown."""
    used: int
    """Number of verified nodes that were accepted; of growth, the nodes in the next block, if this was the last call
    before it."""
    timing: Timing | None
    """None when the engine has not reported it."""
    verified: VerifiedBlock | None = None
    """Of a verification alone."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream."""

    text: str
    """The text that these tokens complete: a character or a possible stop string may be held back until later ones."""
    token_ids: tuple[int, ...]
    guessed: tuple[bool, ...]
    """For each id: the draft had guessed it (else it is the target's own)."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each id if they were asked for, else none."""
    usage: Usage
    finish: Finish | None
    """In the last chunk only."""
    trace: tuple[CallTrace, ...] = ()
    """With `trace=True`: the calls that were answered since the last chunk."""
    index: int = 0
    """With `n`: the sample that this belongs to; each has a last chunk of its own, and `usage` is that of all."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """In the first chunk, if they were asked for: one for each token of the prompt but the first."""
    explanation: tuple[str, ...] = ()
    """With `explain=True`: why the decisions since the last chunk were made, a line each."""


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
    """The id of the request in the server's logs."""
    num_calls: int
    """Number of calls: 1, and 1 more for each repetition."""
    samples: tuple[Sample, ...] = ()
    """Every output in order, one without `n`; the fields above, usage apart, are those of the first."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """If they were asked for: one for each token of the prompt but the first."""
    explanation: tuple[str, ...] = ()
    """With `explain=True`: why the decisions of the stream were made, a line each."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the served pair."""

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
    """One model that requests can ask for."""

    name: str
    max_context_tokens: int
    """Of prompt and output together."""
    vocab_size: int
    has_draft: bool
    adapter_of: str = ""
    """Name of the model whose weights this LoRA adapter changes; empty for a model."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of unset sampling fields."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True, slots=True)
class Control:
    """The estimates of the orchestrator that answered, and its present drafting."""

    policy: str
    sessions: int
    draft_tokens: int
    """Depth of a block in tokens; 0 while the draft rests."""
    block_tokens: int
    reason: str
    """The reason of the last change."""
    acceptance: tuple[float, ...]
    hit_rate: float
    verify_s: Mapping[int, float]
    """Estimated seconds of a target pass, by rows."""
    draft_s: Mapping[int, float]
    wire_s: float
    changes: int
    branch_s: float
    """Estimated seconds that each branch of a block adds to a target pass, beside those of its rows."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, and its draft."""

    model: str
    target: Model
    draft: Model | None
    """None when the target is served without one."""
    max_draft_tokens: int
    verification: Verification | Unknown
    sampling_defaults: SamplingDefaults
    control: Control | None
    """None from an orchestrator that does not report it."""
