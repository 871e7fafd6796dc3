"""What travels between orchestrator and engines.

Every message to an engine is a snapshot over a known base: `Base` says which prefix the engine is believed to hold,
`suffix` what follows it. An engine that holds something else answers `Missing` and is sent the rest, so that a first
call (prefill), a lost message, a restart and a preempted KV cache are one case.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.records.request import Sampling
from core.rules import Rule, Verification
from core.speculation import EMPTY_BLOCK, NewNodes, TokenTree, TreeSpec


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What an engine must know of a session beyond its tokens; sent with the first message (base 0) and kept."""

    prompt_len: int
    sampling: Sampling
    verification: Verification = Verification.COUPLED
    num_logprobs: int | None = None
    """Alternatives to report for each emitted token; None reports nothing, 0 the emitted token alone."""

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
    """Which message this is. A reply carries the stamp of its request; one that does not match is dropped."""

    session: str
    """The name of the session's lease on that engine: one for each lease, so what is freed is never a later one's."""
    epoch: int
    """The incarnation of the engine that was leased; an engine refuses other epochs."""
    round: int


@dataclass(frozen=True, slots=True)
class Base:
    """The prefix an engine is believed to hold: its length in tokens and its hash (core.text.token_log)."""

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
    growth: TreeSpec
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""

    @property
    def num_committed(self) -> int:
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """What has grown since the last one, of a session whose draft grows continuously."""

    stamp: Stamp
    """Of the message that the draft knows of."""
    new_nodes: NewNodes
    held: int
    """Committed tokens (guesses not counted) whose KV the draft now holds."""
    timing: Timing | None = None
    """Of the pass that it comes from; none where it took no pass."""
    is_over: bool = False
    """Whether nothing more grows until the session's next message."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What has grown, of growth that ends by itself (`TreeSpec.num_passes`): the reply to its request."""

    stamp: Stamp
    new_nodes: NewNodes
    held: int
    """As `DraftUpdate.held`."""
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
DraftReply = DraftTree | Missing | Refused
