"""The values that travel between the parts; all frozen, all picklable, none knows how it is sent.

A *block* is a token tree: guesses for what follows the last committed token (the root). A chain is the tree of width
one. Every message to an engine is a snapshot over a known base: `Base` says which prefix the engine is believed to
hold, `suffix` what follows it. An engine that holds something else answers `Missing` and is sent the rest, so that a
first call (prefill), a lost message, a restart and a preempted KV cache are one case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import InvalidRequest

ROOT = -1
"""Parent of the first guesses of a block: the last committed token."""


class Verification(StrEnum):
    """How a block is checked against the target (docs/exactness.md)."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A probability distribution over few token ids; the ids it does not list have probability zero."""

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Guesses after the last committed token. Invariant: `parents[i] < i`, so a parent precedes its children."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[SparseDistribution, ...] = ()
    """What the draft sampled each token from; empty in coupled mode, which needs no q."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens) or (self.q and len(self.q) != len(self.tokens)):
            raise ValueError("a token tree needs one parent, and one q or none at all, for each token")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a token tree lists parents before their children")

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Sequence[SparseDistribution] = ()) -> TokenTree:
        """The tree of width one over `tokens`."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(q))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; the first guesses have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def child(self, parent: int, token: int) -> int | None:
        """The node below `parent` that guesses `token`, if there is one."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return None


EMPTY_BLOCK = TokenTree()


def _require(condition: bool, name: str, allowed: str, value: object) -> None:
    if not condition:
        raise InvalidRequest(name, f"must be {allowed}, got {value!r}")


MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """What turns the target's logits into p, and the seed of the noise that draws from it.

    Raises: InvalidRequest for a value outside its range (checks that need the model are made at admission).
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
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), name, "a finite number", getattr(self, name))
        is_temperature = self.temperature == 0 or 1e-3 <= self.temperature <= 100
        _require(is_temperature, "temperature", "0 or in [0.001, 100]", self.temperature)
        _require(0 <= self.top_k < 2**31, "top_k", "at least 0 (0 keeps all)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(0 < self.repetition_penalty <= 10, "repetition_penalty", "in (0, 10]", self.repetition_penalty)
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _require(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        _require(0 <= self.seed <= MAX_SEED, "seed", "in [0, 2^64 - 1]", self.seed)
        for token_id, bias in self.logit_bias:
            _require(-100 <= bias <= 100, f"logit_bias[{token_id}]", "in [-100, 100]", bias)

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


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Extend the held prefix by `suffix`, then guess `num_tokens` further tokens. Zero guesses is prefill."""

    stamp: Stamp
    base: Base
    suffix: tuple[int, ...]
    num_tokens: int
    spec: SequenceSpec | None = None
    """Required when `base.num_tokens` is 0."""

    @property
    def num_committed(self) -> int:
        return self.base.num_tokens + len(self.suffix)


@dataclass(frozen=True, slots=True)
class Drafted:
    """The block that answers a DraftRequest."""

    stamp: Stamp
    block: TokenTree
    held: int
    """Committed tokens (guesses not counted) whose KV the draft now holds."""


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


VerifyReply = Verdict | Missing | Refused
DraftReply = Drafted | Missing | Refused


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
    """Upper bound on guesses a round; 0 decodes plainly; None leaves it to the service."""
    resume_tokens: tuple[int, ...] = ()
    """Output already received: the stream goes on after it as if it had never stopped."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    include_stop: bool = False
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

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0


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
