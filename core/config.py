"""Settings: frozen, typed, checked once at the edge (`deploy.settings`) and handed down.

Each class refuses unknown fields when `deploy.settings` reads it from a file, and out-of-range values wherever it is
made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from core.errors import ConfigError
from core.records import Verification

Dtype = Literal["float32", "bfloat16"]
DECODE_TOKENS = 32
"""More tokens than this to catch up with is prefill: it goes out in a call of its own, waits for others' decoding, and
nobody waits for a guess that has it before it. Orchestrator and engines draw the line at the same length."""
Policy = Literal["adaptive", "static", "heuristic", "confidence", "entropy"]


def _check(condition: bool, setting: str, allowed: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{setting} must be {allowed}, got {value!r}")


def _forbid_unknown() -> dict[str, Any]:
    """What pydantic reads from `__pydantic_config__`; core itself does not import pydantic."""
    return {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model and the memory and arithmetic it may use."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    model: str
    """Directory of a checkpoint: config.json, *.safetensors, tokenizer.json."""
    dtype: Dtype = "float32"
    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:0."""
    num_threads: int = 1
    """CPU threads of the forward pass."""
    kv_cache_tokens: int = 32_768
    """Tokens of KV in all, shared by the sessions; rounded up to whole blocks."""
    block_tokens: int = 16
    max_step_tokens: int = 512
    """Rows of one forward pass, over all sequences."""
    prefill_chunk_tokens: int = 256
    """Rows that prefill may take of a step in which others are decoding."""
    max_context_tokens: int | None = None
    """Lower than the model's own limit; None takes the model's."""
    deterministic: bool = False
    """Compute each row in tiles of one fixed shape: its bits do not depend on what shares its step. On a CPU only."""
    session_timeout_s: float = 600.0
    """A session that says nothing for this long is dropped and its KV freed."""

    def __post_init__(self) -> None:
        _check(bool(self.model), "model", "the directory of a checkpoint", self.model)
        for name in ("num_threads", "kv_cache_tokens", "block_tokens", "max_step_tokens", "prefill_chunk_tokens"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        has_room = self.max_context_tokens is None or self.max_context_tokens >= 2
        _check(has_room, "max_context_tokens", "at least 2", self.max_context_tokens)
        _check(self.session_timeout_s > 0, "session_timeout_s", "positive", self.session_timeout_s)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How many replicas of an engine there are, and what each asks of the cluster."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    engine: EngineConfig
    num_replicas: int = 1
    num_cpus: float = 1.0
    """Ray's logical CPUs for the engine actor."""
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    """Custom Ray resources that place the engine (for example {"small_gpu": 1})."""
    max_sessions: int = 256
    """Leases that one replica grants."""

    def __post_init__(self) -> None:
        _check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        _check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        _check(self.num_gpus >= 0, "num_gpus", "at least 0", self.num_gpus)
        _check(self.max_sessions >= 1, "max_sessions", "at least 1", self.max_sessions)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How far to draft, and how guesses are checked unless a request says otherwise."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    policy: Policy = "adaptive"
    """Who decides how far to draft: "adaptive" by costs and acceptance as they are observed, "static" always
    `max_draft_tokens`, "heuristic" two more after a block that was accepted whole and one less otherwise, "confidence"
    and "entropy" up to `max_draft_tokens` while the draft is sure enough."""
    pipelining: bool = True
    """Draft the next block, for every likely outcome, while the last one is verified. False drafts and verifies in
    turn."""
    max_draft_tokens: int = 8
    """Draft length gamma, in tokens from the root down: the most that the policy may choose."""
    max_block_tokens: int = 32
    """Nodes of a block, over all branches of its tree. Trees are verified in coupled mode only."""
    max_table_tokens: int = 256
    """Nodes of an outcome table; in rejection and block mode, whose tables carry q, a quarter of it."""
    table_fanout: int = 4
    """Next tokens that a policy other than "adaptive" prepares for at each place where a block may end."""
    min_confidence: float = 0.4
    """Of the policy "confidence"."""
    max_entropy: float = 2.0
    """Of the policy "entropy", in nats."""
    lookup: bool = True
    """Guess from the text so far when there is no draft to ask."""
    verification: Verification = Verification.COUPLED
    q_top_tokens: int = 64
    """In rejection and block mode the draft samples from its q cut to this many tokens, and sends just those."""
    draft_timeout_s: float = 0.25
    """A block that comes later than this, and than a few times its usual pace, counts as lost for its round."""
    draft_retry_s: float = 1.0
    """First pause before a lost draft is leased again; doubles up to a minute, with jitter."""
    breaker_rounds: int = 3
    """A draft that is late this often in a row is given back, and leased again after the pause."""

    def __post_init__(self) -> None:
        _check(self.policy in get_args(Policy), "policy", f"one of {', '.join(get_args(Policy))}", self.policy)
        _check(0 <= self.max_draft_tokens <= 64, "max_draft_tokens", "in [0, 64]", self.max_draft_tokens)
        _check(1 <= self.max_block_tokens <= 256, "max_block_tokens", "in [1, 256]", self.max_block_tokens)
        _check(0 <= self.max_table_tokens <= 4096, "max_table_tokens", "in [0, 4096]", self.max_table_tokens)
        _check(1 <= self.table_fanout <= 32, "table_fanout", "in [1, 32]", self.table_fanout)
        _check(0 <= self.min_confidence <= 1, "min_confidence", "in [0, 1]", self.min_confidence)
        _check(self.max_entropy >= 0, "max_entropy", "at least 0", self.max_entropy)
        _check(1 <= self.q_top_tokens <= 4096, "q_top_tokens", "in [1, 4096]", self.q_top_tokens)
        _check(self.draft_timeout_s > 0, "draft_timeout_s", "positive", self.draft_timeout_s)
        _check(self.draft_retry_s > 0, "draft_retry_s", "positive", self.draft_retry_s)
        _check(self.breaker_rounds >= 1, "breaker_rounds", "at least 1", self.breaker_rounds)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    max_sessions: int = 128
    """Completions in progress on one orchestrator; more are refused at once."""
    retry_after_s: float = 1.0
    """What a refused caller is told to wait."""
    default_max_tokens: int = 256
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 512
    max_logprobs: int = 20
    max_message_bytes: int = 4 * 1024 * 1024
    max_target_retries: int = 4
    """Times one completion may lose its target before it fails."""
    lease_timeout_s: float = 30.0
    """A session that no replica has taken by then fails."""
    reply_timeout_s: float = 60.0
    """An engine that has not answered a call by then counts as lost; longer than the longest prefill takes."""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "default_max_tokens", "max_stop_chars", "max_message_bytes"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("max_stop_strings", "max_stop_token_ids", "max_logit_bias", "max_logprobs", "max_target_retries"):
            _check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("retry_after_s", "lease_timeout_s", "reply_timeout_s"):
            _check(getattr(self, name) > 0, name, "positive", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One served pair: a target, perhaps a draft, and the orchestrators in front of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    target: WorkerConfig
    draft: WorkerConfig | None = None
    """None serves plain decoding."""
    model_name: str = "outrider-demo"
    """What requests call this pair."""
    num_orchestrators: int = 1
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _check(bool(self.model_name), "model_name", "not empty", self.model_name)
        _check(self.num_orchestrators >= 1, "num_orchestrators", "at least 1", self.num_orchestrators)
