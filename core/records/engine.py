"""Messages between orchestrator and engines.

Every message to an engine is a snapshot over a known base: `Base` says which prefix the engine is believed to hold,
`suffix` what follows it. An engine that holds something else answers `Missing` and is sent the rest, so that a first
call (prefill), a lost message, a restart and a preempted KV cache are one case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from core import ranges
from core.records.request import GenerationRequest, Grammar, Sampling
from core.rules import Rule, Verification
from core.speculation import EMPTY_BLOCK, NewNodes, TokenTree, TreeSpec


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The properties of a session beyond its tokens; sent with the first message (base 0), kept by the engine."""

    prompt_len: int
    sampling: Sampling
    verification: Verification = Verification.COUPLED
    num_logprobs: int | None = None
    """Alternatives to report for each emitted token; None reports nothing, 0 the emitted token alone."""
    num_prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    grammar: Grammar | None = None
    """Of the output, whose rows are masked by it on both sides."""
    lenience: float = 1.0
    """Of a rule that takes one: how much less likely than the best a guess may be, in (0, 1]."""

    def __post_init__(self) -> None:
        ranges.check("lenience", self.lenience, ranges.LENIENCE)

    @classmethod
    def of(cls, request: GenerationRequest) -> SequenceSpec:
        """What engines are told of a request."""
        return cls(
            prompt_len=len(request.prompt),
            sampling=request.sampling,
            verification=request.verification,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
            grammar=request.grammar,
            lenience=request.lenience,
        )

    def at_draft_temperature(self, temperature: float | None) -> SequenceSpec:
        """What a draft is told, that is to guess at this temperature; None, or greedy decoding, leaves the target's.

        Whatever verifies the guesses stays the same, and q is what such a draft draws from.
        """
        if temperature is None or self.sampling.is_greedy:
            return self
        return replace(self, sampling=replace(self.sampling, temperature=temperature))

    @property
    def rule(self) -> Rule:
        """What verifies its blocks."""
        return self.verification.at(is_greedy=self.sampling.is_greedy)

    @property
    def needs_q(self) -> bool:
        """Whether verification needs what each guess was drawn from: so the draft draws."""
        return self.rule.needs_q

    @property
    def takes_trees(self) -> bool:
        """Whether a node of a block may have several children."""
        return self.rule.takes_trees


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity of a message. A reply carries the stamp of its request; one that does not match is dropped."""

    session: str
    """The name of the session's lease on that engine. Each lease has its own, so that a late release frees no later
    lease."""
    epoch: int
    """The incarnation of the engine that was leased; an engine refuses other epochs."""
    round: int


@dataclass(frozen=True, slots=True)
class Base:
    """The prefix that an engine is believed to hold: its length in tokens and its hash (core.text.token_log)."""

    num_tokens: int
    prefix_hash: int


class Want(StrEnum):
    """What a target may say beside its verdict, where a message asks for it. What it cannot say it leaves out."""

    SAMPLES = "samples"
    """The target's own token after the root and after each node of the block, whatever the verdict."""


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
    wants: tuple[Want, ...] = ()
    """What is to be said beside the verdict; each at most once."""

    @property
    def num_committed(self) -> int:
        """Number of tokens of the session when this is sent: the position of the next one."""
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The next message, offered in advance: the target uses it at its verdict instead of waiting for the message.

    It is offered while the message of round `after` is verified, or before: where that is offered, too. Of several for
    one round the last one counts, and what was offered beyond the others does not. The end of the verdict
    (accepted path, next token) is looked up in `tree`; the nodes below are the block of the next message, which has
    this stamp. An offer that is not used is answered `Refused`.
    """

    stamp: Stamp
    after: int
    """Round of the message whose verdict it follows."""
    tree: TokenTree
    """The block of that message, node by node, and the nodes that may follow below it."""
    is_open: bool = False
    """Whether to go on with an empty block where the verdict is not found in the tree."""


TargetRequest = VerifyRequest | Continuation


@dataclass(frozen=True, slots=True)
class Timing:
    """The time that the engine spent on a reply; the rest of its round trip is the wire's."""

    waited_s: float
    """Seconds from its arrival to the beginning of its first step."""
    computed_s: float
    """Seconds from the beginning of its first step to the end of its last, steps of others in between included."""
    num_passes: int
    """Number of steps that it took part in."""
    num_rows: int
    """Number of rows of those steps, those of other requests included."""
    num_sessions: int = 0
    """Number of sessions that the engine held in the last of them, this one included; 0 where it does not say."""


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
    """Number of tokens whose KV the engine now holds: all committed ones but `next_token`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each emitted token (path, then next token), when asked for."""
    timing: Timing | None = None
    continued: int = 0
    """Round of the continuation that the target has used; 0 where it waits for a message."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of the prompt but the first, if the message brought the whole prompt and a spec asks for
    them."""
    num_relaxed: int = 0
    """Of the accepted nodes, those that the exact rule would have rejected in their place."""
    samples: tuple[int, ...] = ()
    """`Want.SAMPLES`: one for the root and one for each node, or none at all. The sample after a node of depth d has
    the noise of the place at which it would stand, d tokens after the next one."""
    num_cached: int = 0
    """Number of tokens whose KV was taken from the prefix cache for this verdict; a sequence that was there takes
    none."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Extend the held prefix by `suffix`, then grow below it."""

    stamp: Stamp
    base: Base
    suffix: tuple[int, ...]
    growth: TreeSpec
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""

    @property
    def num_committed(self) -> int:
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """The nodes that a continuously growing draft has added to a session's tree since the last update."""

    stamp: Stamp
    """Stamp of the last message that the draft knows."""
    new_nodes: NewNodes
    held: int
    """Number of committed tokens (guesses not counted) whose KV the draft now holds."""
    timing: Timing | None = None
    """Timing of the pass that it comes from; None without a pass."""
    is_over: bool = False
    """Whether nothing more grows until the session's next message."""


@dataclass(frozen=True, slots=True)
class DraftDone:
    """The draft tree of growth that ends by itself (`TreeSpec.num_passes`): the reply to its request."""

    stamp: Stamp
    new_nodes: NewNodes
    held: int
    """As `DraftUpdate.held`."""
    timing: Timing | None = None
    """Timing of all passes; None without a pass."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The engine does not hold the base of this request; send the tokens from `held` on again (0: with the spec)."""

    stamp: Stamp
    held: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot serve this one request (others in its batch are untouched)."""

    stamp: Stamp
    reason: str
    is_final: bool = False
    """Whether every engine of this model would refuse it, so that a repetition cannot help."""
    field: str | None = None
    """Of the client's request, the one whose value is the reason; None where the model is."""


VerifyReply = Verdict | Missing | Refused
DraftReply = DraftDone | Missing | Refused
