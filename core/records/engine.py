"""Messages between orchestrator and engines.

Every message to an engine is a snapshot over a known base: `Base` names the prefix that the engine is believed to hold,
`suffix` the tokens after it. An engine that holds something else answers `Missing` and then receives the rest. A first
call (prefill), a lost message, a restart and a preempted KV cache are therefore the same case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from core.ranges import check_parameters, parameter, ranges_of
from core.records.adapter import Adapter
from core.records.features import Features
from core.records.request import GenerationRequest, Grammar
from core.records.sampling import Sampling
from core.rules import Rule, Verification
from core.speculation import EMPTY_BLOCK, NO_GUESSES, Guesses, NewNodes, TokenTree, TreeSpec

_OWN = ("prompt_len", "num_likeliest")
"""Fields of a `SequenceSpec` that a request has not under the same name."""
Likeliest = tuple[tuple[int, float], ...]
"""Token ids and their log probabilities after masks, bias and penalties, likeliest first. Empty if no token may come;
`UNSOUND` if the model's scores are NaN or infinite."""
UNSOUND: Likeliest = ((0, math.nan),)


def is_sound(likeliest: Likeliest) -> bool:
    """Whether these are tokens and scores: False for `UNSOUND`."""
    return not any(math.isnan(logprob) for _, logprob in likeliest)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """Parameters of a session besides its tokens. Sent with the first message (base 0) and kept by the engine."""

    prompt_len: int
    sampling: Sampling
    verification: Verification = Verification.COUPLED
    num_logprobs: int | None = None
    """Number of alternatives to report per emitted token. None reports nothing, 0 the emitted token alone."""
    num_prompt_logprobs: int | None = None
    """Like `num_logprobs`, for each prompt token but the first."""
    grammar: Grammar | None = None
    """Grammar of the output. Both draft and target mask their logits with it."""
    lenience: float = parameter(1.0, ranges_of(GenerationRequest)["lenience"])
    adapter: Adapter | None = None
    """LoRA adapter that the target computes this sequence with; None for the model itself."""
    num_source: int = 0
    """Number of tokens at the start of the text that an encoder reads. For a draft without one they are part of the
    text."""
    num_likeliest: int = 0
    """Number of tokens to report after the root and after each node of a block, for a beam search. The target then
    commits nothing, and keeps the block's KV for the next message. 0 verifies the block."""
    learning: bool | None = None
    """Whether the text may be kept for training drafts. None allows it."""

    def __post_init__(self) -> None:
        check_parameters(self)

    @classmethod
    def of(cls, request: GenerationRequest) -> SequenceSpec:
        """Extract the part of a request that engines receive."""
        shared = {each.name: getattr(request, each.name) for each in fields(cls) if each.name not in _OWN}
        return cls(prompt_len=len(request.prompt), **shared)

    def of_draft(self, temperature: float | None) -> SequenceSpec:
        """Return the spec for a draft that guesses at this temperature. None, or greedy decoding, keeps the target's.

        The verification rule stays the same. q is the distribution that the draft samples from. Adapters are the
        target's alone.
        """
        if temperature is None or self.sampling.is_greedy:
            return replace(self, adapter=None)
        return replace(self, sampling=replace(self.sampling, temperature=temperature), adapter=None)

    @property
    def rule(self) -> Rule:
        return self.verification.at(is_greedy=self.sampling.is_greedy)

    @property
    def needs_q(self) -> bool:
        """Whether verification needs the distribution q of each guess. If so, the draft samples."""
        return self.rule.needs_q

    @property
    def takes_trees(self) -> bool:
        """Whether a node of a block may have several children."""
        return self.rule.takes_trees


@dataclass(frozen=True, slots=True)
class Stamp:
    """Key of a message. A reply carries the stamp of its request; replies with any other stamp are dropped."""

    lease: str
    """Name of the session's lease on that engine. Unique per lease, so a late release cannot free a later lease."""
    epoch: int
    """Incarnation of the leased engine. An engine refuses other epochs."""
    round: int


@dataclass(frozen=True, slots=True)
class Base:
    """The prefix that an engine is believed to hold: its length in tokens and its hash (`core.text.token_log`)."""

    num_tokens: int
    prefix_hash: int


class Want(StrEnum):
    """Optional data that a message can request with its verdict. A target leaves out what it cannot provide."""

    SAMPLES = "samples"
    """The target's own token after the root and after each node of the block, independent of the verdict."""
    FEATURES = "features"
    """Hidden states of the root and of the accepted nodes, for a head on a draft engine."""
    GUESSES = "guesses"
    """Guesses below the next token, by the head in the target's engine."""
    PREFIX_FEATURES = "prefix_features"
    """With `FEATURES`: also the hidden states of the tokens that are computed before the root, for a head that keeps KV
    of its own. At most `MAX_FEATURE_TOKENS` of them, the last ones; none of tokens whose KV is there."""

    @property
    def is_standing(self) -> bool:
        """Whether a target that continues by itself returns this with the following verdicts, too."""
        return self not in (Want.SAMPLES, Want.PREFIX_FEATURES)


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Extend the held prefix by `suffix`, then check `block` against the target's own samples.

    The last token of `suffix` is the root of `block`. An empty block makes this a prefill or a plain decoding step.
    """

    stamp: Stamp
    base: Base
    suffix: tuple[int, ...]
    block: TokenTree = EMPTY_BLOCK
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""
    wants: tuple[Want, ...] = ()
    """Extra data to return with the verdict; each at most once."""

    @property
    def num_committed(self) -> int:
        """Number of the session's committed tokens when this is sent: the position of the next one."""
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The next message, offered in advance. The target uses it after its verdict instead of waiting for the message.

    It is offered before or while the message of round `after` is verified; that message may be an offer itself. If a
    round has several offers, the last one counts, and offers that build on the others are dropped. The target looks up
    the verdict's accepted path and next token in `tree`; the nodes below become the block of the next message, which
    carries this stamp. An unused offer is answered with `Refused`.
    """

    stamp: Stamp
    after: int
    """Round of the message whose verdict this follows."""
    tree: TokenTree
    """The block of that message, node by node, and the nodes that may follow below it."""
    is_open: bool = False
    """Whether to continue with an empty block if the verdict is not found in the tree."""


TargetRequest = VerifyRequest | Continuation


@dataclass(frozen=True, slots=True)
class Timing:
    """Time that an engine spent on a reply. The rest of the round trip is the wire."""

    waited_s: float
    """Seconds from the request's arrival to the start of its first step."""
    computed_s: float
    """Seconds from the start of its first step to the end of its last, including steps of other requests in between."""
    num_passes: int
    """Number of steps that the request took part in."""
    num_rows: int
    """Number of rows of those steps, including rows of other requests."""
    num_sessions: int = 0
    """Number of sessions that the engine held in the last step, including this one. 0 if unknown."""
    guessing_s: float = 0.0
    """Seconds of `computed_s`, after the last step, in which the target's head guessed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of an emitted token and of the likeliest alternatives, by the raw model (no temperature)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path through the block, and the target's own token after it (correction or bonus token)."""

    stamp: Stamp
    path: tuple[int, ...]
    """Accepted nodes, from the root downwards."""
    next_token: int
    held: int
    """Number of tokens whose KV the engine now holds: all committed tokens but `next_token`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per emitted token (the path, then the next token), if requested."""
    timing: Timing | None = None
    continued: int = 0
    """Round of the continuation that the target used; 0 if it waits for a message."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per prompt token but the first, if the spec requests them and the message carried the whole prompt."""
    num_relaxed: int = 0
    """Number of accepted nodes that the exact rule would have rejected."""
    samples: tuple[int, ...] = ()
    """For `Want.SAMPLES`: one for the root and one per node, or empty. The sample after a node of depth d uses the
    noise of its own position: d tokens after the next one."""
    num_cached: int = 0
    """Number of tokens whose KV came from the prefix cache for this verdict; 0 if the sequence was already on the
    engine."""
    features: Features | None = None
    """For `Want.FEATURES`: of the root and the accepted nodes. They end before `next_token`, which has no row yet."""
    guesses: Guesses = NO_GUESSES
    """For `Want.GUESSES`: below `next_token`."""
    likeliest: tuple[Likeliest, ...] = ()
    """For a spec with `num_likeliest`: after the root, then after each node of the block. Empty above all nodes that
    the message added: what follows there was reported before."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Extend the held prefix by `suffix`, then grow a draft tree below it."""

    stamp: Stamp
    base: Base
    suffix: tuple[int, ...]
    growth: TreeSpec
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""
    features: Features | None = None
    """The target's, up to the last token of `suffix`, which has none yet. Required by an engine that runs a head."""

    @property
    def num_committed(self) -> int:
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """Nodes that a draft has added to a session's tree since the last update.

    Growth that ends by itself (`TreeSpec.num_passes`) is reported once, at its end; any other growth after each pass.
    """

    stamp: Stamp
    """Stamp of the last message that the draft has received."""
    new_nodes: NewNodes
    held: int
    """Number of committed tokens whose KV the draft now holds; guesses are not counted."""
    timing: Timing | None = None
    """Timing of the passes that produced it; None if there was no pass."""
    is_over: bool = False
    """Whether growth stops until the session's next message. No other reply to this message follows."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The engine does not hold the base of this request. Resend the tokens from `held` on, and the spec if it is 0."""

    stamp: Stamp
    held: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot serve this request. Other requests of its batch are not affected."""

    stamp: Stamp
    reason: str
    is_final: bool = False
    """Whether every engine of this model would refuse it, so that a retry cannot help."""
    field: str | None = None
    """Field of the client's request that causes the refusal; None if the model causes it."""


VerifyReply = Verdict | Missing | Refused
DraftReply = DraftUpdate | Missing | Refused


def is_last(reply: VerifyReply | DraftReply) -> bool:
    """Whether a reply ends its message. All do, except a `DraftUpdate` of growth that continues."""
    return not isinstance(reply, DraftUpdate) or reply.is_over
