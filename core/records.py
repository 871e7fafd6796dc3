"""The values that travel between the parts; all frozen, all picklable, none knows how it is sent.

A *block* is a token tree (core.trees): guesses for what follows the last committed token (the root). Every message to
an engine is a snapshot over a known base: `Base` says which prefix the engine is believed to hold, `suffix` what
follows it. An engine that holds something else answers `Missing` and is sent the rest, so that a first call (prefill),
a lost message, a restart and a preempted KV cache are one case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from core import ranges
from core.trees import EMPTY_BLOCK, Steady, TokenTree, Told


class Verification(StrEnum):
    """How a block is checked against the target (docs/exactness.md)."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


Policy = Literal["adaptive", "static", "static_tree", "heuristic", "confidence", "path_probability", "entropy"]
"""Who decides how far to draft (docs/control.md)."""


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """What turns the target's logits into p, and the seed of the noise that draws from it.

    Raises: InvalidRequest for a value outside its range in `core.ranges` (checks that need the model are made at
    admission).
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Over the output alone."""
    frequency_penalty: float = 0.0
    """Over the output alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Tokens of output before `suppressed_ids` may appear."""
    suppressed_ids: tuple[int, ...] = ()
    """The ids that end the output; they are masked until `min_tokens` have been generated."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in ranges.SAMPLING.items():
            ranges.check(name, getattr(self, name), allowed)
        for token_id, bias in self.logit_bias:
            ranges.check(f"logit_bias[{token_id}]", bias, ranges.LOGIT_BIAS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What an engine must know of a session beyond its tokens; sent with the first message (base 0) and kept."""

    prompt_len: int
    sampling: Sampling
    verification: Verification = Verification.COUPLED
    num_logprobs: int | None = None
    """Alternatives to report for each emitted token; None reports nothing, 0 the emitted token alone."""

    @property
    def needs_q(self) -> bool:
        """Whether verification needs what each guess was drawn from: so the draft draws, and blocks are chains."""
        return self.verification is not Verification.COUPLED and not self.sampling.is_greedy


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which message this is. A reply carries the stamp of its request; one that does not match is dropped."""

    session: str
    """The name of the session's lease on that engine: one for each lease, so what is freed is never a later one's."""
    epoch: int
    """The incarnation of the engine that was leased; an engine refuses other epochs."""
    round: int


@dataclass(frozen=True, slots=True)
class Base:
    """The prefix an engine is believed to hold: its length in tokens and its hash (core.token_log)."""

    num_tokens: int
    prefix_hash: int


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Extend the held prefix by `suffix`, then check `block` against the target's own samples.

    The last token of `suffix` is the root of `block`. With an empty block this is prefill, or a plain step.
    """

    stamp: Stamp
    base: Base
    suffix: tuple[int, ...]
    block: TokenTree = EMPTY_BLOCK
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""

    @property
    def num_committed(self) -> int:
        """Tokens of the session when this was sent: the position of the next one."""
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A message that the target may make for itself when a verdict comes, instead of waiting for it to arrive.

    It is offered while the message of round `after` is verified, in any number: the last one counts. What the verdict
    ends in (accepted path, next token) is looked up in `tree`; what hangs below is the block of the next message, whose
    stamp this is. An offer that comes to nothing is answered `Refused`.
    """

    stamp: Stamp
    after: int
    """Round of the message that is verified."""
    tree: TokenTree
    """The block of that message, node by node, and below it what may follow."""
    is_open: bool = False
    """Whether to go on with an empty block where the verdict is not found in the tree."""


TargetRequest = VerifyRequest | Continuation


@dataclass(frozen=True, slots=True)
class Timing:
    """What a reply cost where it was made; the rest of its round trip is the wire's."""

    waited_s: float
    """From its arrival to the beginning of its first step."""
    computed_s: float
    """From the beginning of its first step to the end of its last, the steps of others in between included."""
    num_passes: int
    """Steps that it took part in."""
    num_rows: int
    """Rows of those steps, the company's included."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of an emitted token, and of the likeliest others, under the raw model (no temperature)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path through the block, and the target's own next token after it (the correction, or the bonus)."""

    stamp: Stamp
    path: tuple[int, ...]
    """Accepted nodes, root downwards."""
    next_token: int
    held: int
    """Tokens whose KV the engine now holds: all that are committed but `next_token`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each emitted token (path, then next token), when asked for."""
    timing: Timing | None = None
    continued: int = 0
    """Round of the continuation that the target has gone on with; 0 where it waits for a message."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Extend the held prefix by `suffix`, then grow below it."""

    stamp: Stamp
    base: Base
    suffix: tuple[int, ...]
    growth: Steady
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""

    @property
    def num_committed(self) -> int:
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class Sprouted:
    """What has grown since the last one, of a session whose draft grows steadily."""

    stamp: Stamp
    """Of the message that the draft knows of."""
    told: Told
    held: int
    """Committed tokens (guesses not counted) whose KV the draft now holds."""
    timing: Timing | None = None
    """Of the pass that it comes from; none where it took no pass."""
    is_over: bool = False
    """Whether nothing more grows until the session's next message."""


@dataclass(frozen=True, slots=True)
class GrownTree:
    """What has grown, of growth that ends by itself (`Steady.num_passes`): the reply to its request."""

    stamp: Stamp
    told: Told
    held: int
    """As `Sprouted.held`."""
    timing: Timing | None = None
    """Of all passes; none where it took none."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The engine does not hold the base of this request; send again from `held` tokens on (0: with the spec)."""

    stamp: Stamp
    held: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot serve this one request (others in its batch are untouched)."""

    stamp: Stamp
    reason: str
    is_final: bool = False
    """Whether every engine of this model would refuse it, so that repeating the request cannot help."""


VerifyReply = Verdict | Missing | Refused
DraftReply = GrownTree | Missing | Refused


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a loaded model."""

    name: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    vocab_size: int
    """Ids that a token has; rows of the embedding beyond are padding and masked."""
    max_context_tokens: int
    kv_cache_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to produce, checked as far as that goes without the model."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verification: Verification = Verification.COUPLED
    max_draft_tokens: int | None = None
    """Upper bound on the draft length, from the root down; 0 decodes plainly; None leaves it to the service."""
    policy: Policy | None = None
    """None leaves it to the service, as with `pipelining`."""
    pipelining: bool | None = None
    """Whether the next block is prepared while the last one is verified."""
    resume_tokens: tuple[int, ...] = ()
    """Output already received: the stream goes on after it as if it had never stopped."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    include_stop: bool = False
    wants_trace: bool = False
    """Report each call to an engine with the chunk that it led to."""
    deadline: float | None = None
    """On the service's clock, in seconds."""


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


class Call(StrEnum):
    """What an engine was asked for."""

    VERIFY = "verify"
    BLOCK = "block"
    GROWTH = "growth"
    """One pass of a draft that goes on growing."""
    PREFILL = "prefill"
    """Of the draft, so that it catches up; the target's prefill is verifying an empty block."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One answered call of a stream to an engine."""

    call: Call
    sent_s: float
    """Since the stream began, on the orchestrator's clock, as is `received_s`."""
    received_s: float
    num_guesses: int
    """Nodes verified, or nodes grown."""
    num_used: int = 0
    """Of the nodes verified, those accepted; of growth, those of the next block, if it was the last before that."""
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and output so far; resumed tokens count as output."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. Text may lag behind the ids while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    is_guess: tuple[bool, ...]
    """For each id: whether the draft had guessed it (else it is the target's correction or bonus)."""
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    stats: SpeculationStats | None = field(default=None)
    """In the last chunk."""
    trace: tuple[CallTrace, ...] = ()
    """The calls that were answered since the last chunk, when asked for."""
