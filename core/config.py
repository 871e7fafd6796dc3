"""Settings: frozen, typed, checked once at the edge (`deploy.settings`) and handed down.

Each class refuses unknown fields when `deploy.settings` reads it from a file, and out-of-range values wherever it is
made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from core.errors import ConfigError
from core.pass_law import PASS_LAWS
from core.records import Policy, Verification

Dtype = Literal["float32", "bfloat16"]
DECODE_TOKENS = 32
"""More tokens than this to catch up with is prefill: it goes out in a call of its own, waits for others' decoding, and
nobody waits for a guess that has it before it. Orchestrator and engines draw the line at the same length."""
LINK_PORTS = (20200, 20299)
"""Beside Ray's own (10002 to 19999 for its processes) and below those that the kernel gives to clients."""
MIN_CHUNK_TOKENS = 8
"""Prefill gets so many rows of a step at least, whatever it costs others; and a prompt's last so many go whole."""


def _check(condition: bool, setting: str, allowed: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{setting} must be {allowed}, got {value!r}")


def _forbid_unknown() -> dict[str, Any]:
    """What pydantic reads from `__pydantic_config__`; core itself does not import pydantic."""
    return {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class LinkTls:
    """Files (PEM) with which orchestrators and engines encrypt their links and prove who they are.

    The paths are the same on every node that has either. Files that change count for every link opened after that.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    certificate_file: str
    """Certificate of the node, followed by intermediate ones if there are any. It has to be valid for both uses (server
    and client authentication) if it names any; host names in it are not looked at."""
    key_file: str
    """Private key of the certificate, without a passphrase."""
    ca_file: str
    """Certificates of the authorities. The other end's certificate has to be signed by one of them. Use an authority
    that signs for this service alone: all that it signs for are trusted alike."""

    def __post_init__(self) -> None:
        for name in ("certificate_file", "key_file", "ca_file"):
            _check(bool(getattr(self, name)), name, "the path of a file", getattr(self, name))


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
    kv_cache_tokens: int | None = 32_768
    """Tokens of KV in all, shared by the sessions; rounded up to whole blocks. None takes what there is memory for."""
    kv_memory_share: float = 0.8
    """Of what is free once the model is loaded, what KV may take if `kv_cache_tokens` is None. Shares of engines that
    have one memory have to add up to 1 or less; what is left is for the numbers of a step."""
    block_tokens: int = 16
    """Tokens to a block of KV. A GPU reads blocks in place if they are a multiple of 256, others are gathered first."""
    max_step_tokens: int = 512
    """Rows of one forward pass, over all sequences."""
    prefill_chunk_tokens: int = 256
    """Rows that prefill may take at most of a step in which others are decoding,"""
    prefill_stretch: float = 1.75
    """and as many as let it take so many times as long as without; what is learned of that may be some way off."""
    max_context_tokens: int | None = None
    """Lower than the model's own limit; None takes the model's."""
    deterministic: bool = False
    """Compute each row in tiles of one fixed shape: its bits do not depend on what shares its step. On a CPU only."""
    compile: bool = False
    """Make native code of the forward pass at start: a minute and a C++ compiler the first time, less of every step
    afterwards. On a GPU, record small steps as CUDA graphs at each start; block_tokens has to suit it. For models that
    one process has whole."""
    compile_cache: str = "~/.cache/outrider/compiled"
    """Where native code is kept for later starts. What lies there is run."""
    share_prefixes: bool = True
    """Compute what prompts begin with in common once, and keep KV of ended sessions until the room is needed."""
    session_timeout_s: float = 600.0
    """A session that says nothing for this long is dropped and its KV freed."""
    tensor_parallel: int = 1
    """Ranks that share the model, each a process of its own that holds its slices of the weights and of the KV."""
    link_ports: tuple[int, int] | None = LINK_PORTS
    """First and last of the TCP ports at which the engine may listen for orchestrators; it takes the first that is
    free, at the address of its node. [0, 0] takes any free port. None, or no free port, leaves the way through Ray's
    actor calls, which takes milliseconds a call."""
    paced_as: str | None = None
    """A model on other hardware, by its name in `core.pass_law`: each forward pass then lasts at least as long as that
    model's would over as many rows, by waiting. To see on a small machine, with a small model, what a deployment does
    around its models: never where outputs are wanted soon. None does not wait."""
    link_tls: LinkTls | None = None
    """Encrypts the engine's links, and has both ends show a certificate. Set it where others can read the network
    between nodes, together with Ray's own TLS, since leases and actor calls go over that. None, and no
    OUTRIDER_LINK_TLS_DIR in the environment, leaves links authenticated by the lease's key, and readable."""

    def __post_init__(self) -> None:
        _check(bool(self.model), "model", "the directory of a checkpoint", self.model)
        has_kv = self.kv_cache_tokens is None or self.kv_cache_tokens >= 1
        _check(has_kv, "kv_cache_tokens", "at least 1", self.kv_cache_tokens)
        _check(0 < self.kv_memory_share <= 1, "kv_memory_share", "above 0 and at most 1", self.kv_memory_share)
        for name in ("num_threads", "block_tokens", "max_step_tokens", "prefill_chunk_tokens"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        has_room = self.max_context_tokens is None or self.max_context_tokens >= 2
        _check(has_room, "max_context_tokens", "at least 2", self.max_context_tokens)
        _check(self.prefill_stretch >= 1, "prefill_stretch", "at least 1", self.prefill_stretch)
        _check(self.session_timeout_s > 0, "session_timeout_s", "positive", self.session_timeout_s)
        _check(self.tensor_parallel >= 1, "tensor_parallel", "at least 1", self.tensor_parallel)
        first, last = self.link_ports or (0, 0)
        _check(0 <= first <= last < 2**16, "link_ports", "two ports in ascending order", self.link_ports)
        is_known = self.paced_as is None or self.paced_as in PASS_LAWS
        _check(is_known, "paced_as", f"one of {', '.join(PASS_LAWS)}", self.paced_as)


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Between which counts the replicas of a deployment follow its load, and how soon."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    max_replicas: int
    min_replicas: int = 1
    """0 lets the last replica go when nothing is asked of it."""
    upscale_delay_s: float = 10.0
    """More replicas must have been wanted for this long; the first one, from none, is started at once."""
    downscale_delay_s: float = 600.0
    """Fewer replicas must have been wanted for this long."""
    window_s: float = 20.0
    """Load is averaged over this time; replicas report every ten seconds."""

    def __post_init__(self) -> None:
        _check(self.min_replicas >= 0, "min_replicas", "at least 0", self.min_replicas)
        least = max(1, self.min_replicas)
        _check(self.max_replicas >= least, "max_replicas", f"at least {least}", self.max_replicas)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            _check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _check(self.window_s > 10, "window_s", "above 10", self.window_s)


@dataclass(frozen=True, slots=True)
class OrchestratorScaling(Autoscaling):
    """Orchestrators follow the requests in progress."""

    sessions: float = 64.0
    """Requests in progress that one orchestrator is meant to have."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        _check(self.sessions > 0, "sessions", "positive", self.sessions)
        _check(self.min_replicas >= 1, "min_replicas", "at least 1: orchestrators take the calls", self.min_replicas)


@dataclass(frozen=True, slots=True)
class TargetScaling(Autoscaling):
    """Targets follow the sessions that they hold and the KV that these fill, whichever asks for more."""

    sessions: float = 32.0
    """Live sessions that one replica is meant to have, those that wait for a place included."""
    kv_use: float = 0.8
    """Share of its KV that one replica is meant to have in use."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        _check(self.sessions > 0, "sessions", "positive", self.sessions)
        _check(0 < self.kv_use <= 1, "kv_use", "in (0, 1]", self.kv_use)


@dataclass(frozen=True, slots=True)
class DraftScaling(Autoscaling):
    """Drafts follow their own utilisation and the time that verification waits for them.

    Not the length of a queue: a draft that lags behind has none, because whoever waits too long goes on without it.
    """

    busy: float = 0.7
    """Share of the time that one replica is meant to compute."""
    wait: float = 0.1
    """Share of a round that sessions may wait for a draft before another replica is worth its while."""
    sessions: float = 256.0
    """Sessions that one replica is meant to have at most, busy or not: `max_sessions` of them find no place on more."""

    def __post_init__(self) -> None:
        Autoscaling.__post_init__(self)
        _check(self.sessions > 0, "sessions", "positive", self.sessions)
        _check(0 < self.busy <= 1, "busy", "in (0, 1]", self.busy)
        _check(0 < self.wait <= 1, "wait", "in (0, 1]", self.wait)


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """How many orchestrators there are, and where."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    num_replicas: int = 1
    num_cpus: float = 1.0
    """Ray's logical CPUs for one: it is one busy event loop."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom Ray resources that place it."""
    labels: dict[str, str] = field(default_factory=dict)
    """Ray labels that its node must have, as Ray's label selectors say it (for example {"zone": "in(a,b)"})."""
    surge_percent: int = 25
    """In an update, new replicas beyond the wanted number, rounded up, that start before old ones stop; 0, for a
    cluster without room for one more, stops old ones first."""
    autoscaling: OrchestratorScaling | None = None
    """None keeps `num_replicas`."""
    tokens_file: str | None = None
    """A file of tokens, one to a line; callers have to send one of them as metadata `authorization: Bearer TOKEN`.
    It is read again when it changes. None, and no OUTRIDER_TOKENS_FILE in the environment, serves everybody."""

    def __post_init__(self) -> None:
        _check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        _check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        _check(0 <= self.surge_percent <= 100, "surge_percent", "in [0, 100]", self.surge_percent)


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
    labels: dict[str, str] = field(default_factory=dict)
    """Ray labels that the node must have, as Ray's label selectors say it."""
    surge_percent: int = 25
    """As in OrchestratorConfig."""
    max_sessions: int = 256
    """Leases that one replica grants."""

    def __post_init__(self) -> None:
        _check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        _check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        _check(self.num_gpus >= 0, "num_gpus", "at least 0", self.num_gpus)
        _check(0 <= self.surge_percent <= 100, "surge_percent", "in [0, 100]", self.surge_percent)
        _check(self.max_sessions >= 1, "max_sessions", "at least 1", self.max_sessions)


@dataclass(frozen=True, slots=True)
class TargetConfig(WorkerConfig):
    """The engines that verify."""

    autoscaling: TargetScaling | None = None
    """None keeps `num_replicas`."""


@dataclass(frozen=True, slots=True)
class DraftConfig(WorkerConfig):
    """The engines that guess."""

    autoscaling: DraftScaling | None = None
    """None keeps `num_replicas`."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How far to draft, and how guesses are checked unless a request says otherwise."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    policy: Policy = "adaptive"
    """Who decides how far to draft: "adaptive" by costs and acceptance as they are observed, "static" always
    `max_draft_tokens`, "static_tree" always the `max_block_tokens` likeliest nodes of the draft's tree, "heuristic" two
    more after a block that was accepted whole and one less otherwise, "confidence", "path_probability" and "entropy" up
    to `max_draft_tokens` while the draft is sure enough."""
    pipelining: bool = True
    """Draft on while the last block is verified. False drafts and verifies in turn, as drafts that sample always do
    (rejection and block verification above temperature 0)."""
    max_draft_tokens: int = 8
    """Draft length gamma, in tokens from the root down: the most that the policy may choose."""
    max_block_tokens: int = 32
    """Nodes of a block, over all branches of its tree, in [1, 256]: the most that the policy "adaptive" may choose, and
    the number that "static_tree" always verifies. Lower it where many sessions share the target or a row is dear.
    Trees are verified in greedy and coupled mode only."""
    min_path_probability: float = 0.03
    """Of the policy "path_probability": a chain ends before the first guess whose path probability, the product of the
    draft's own chances from the root down to it, is below this; in [0, 1], and 0 ends none early. Raise it where rows
    of the target are dear, lower it where drafts are short although the target accepts them whole."""
    min_confidence: float = 0.4
    """Of the policy "confidence"."""
    max_entropy: float = 2.0
    """Of the policy "entropy", in nats."""
    lookup: bool = True
    """Guess from the text so far when the draft has nothing; the policy "adaptive" does so beside the draft's guesses,
    in greedy and coupled mode."""
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
        _check(0 <= self.min_confidence <= 1, "min_confidence", "in [0, 1]", self.min_confidence)
        is_chance = 0 <= self.min_path_probability <= 1
        _check(is_chance, "min_path_probability", "in [0, 1]", self.min_path_probability)
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
    """Times in a row that one completion may lose its target, no token won in between, before it fails."""
    drain_grace_s: float = 30.0
    """A completion whose target is to stop goes on there for so long; then it moves to another."""
    lease_timeout_s: float = 30.0
    """A session that no replica has taken by then fails."""
    reply_timeout_s: float = 60.0
    """An engine that has not answered a call by then counts as lost; longer than the longest prefill takes."""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "default_max_tokens", "max_stop_chars", "max_message_bytes"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("max_stop_strings", "max_stop_token_ids", "max_logit_bias", "max_logprobs", "max_target_retries"):
            _check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _check(self.drain_grace_s >= 0, "drain_grace_s", "at least 0", self.drain_grace_s)
        for name in ("retry_after_s", "lease_timeout_s", "reply_timeout_s"):
            _check(getattr(self, name) > 0, name, "positive", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One served pair: a target, perhaps a draft, and the orchestrators in front of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    target: TargetConfig
    draft: DraftConfig | None = None
    """None serves plain decoding."""
    shared_draft: str | None = None
    """Instead: a draft of the fleet, by its name; all models that name it use the same replicas."""
    model_name: str = "outrider-demo"
    """What requests call this pair."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _check(bool(self.model_name), "model_name", "not empty", self.model_name)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Several models behind the same orchestrators; requests choose by `model`, and get the first without it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _forbid_unknown()

    models: tuple[ServiceConfig, ...]
    """Each with its target, and a draft of its own or a shared one."""
    drafts: dict[str, DraftConfig] = field(default_factory=dict)
    """That models may share, by name; their vocabulary must be that of each target."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)

    def __post_init__(self) -> None:
        _check(bool(self.models), "models", "at least one", ())
        names = [model.model_name for model in self.models]
        _check(len(set(names)) == len(names), "models", "of different model_name", names)
        for model in self.models:
            self._check_draft(model)
        unused = [name for name in self.drafts if name not in {model.shared_draft for model in self.models}]
        _check(not unused, "drafts", "named by a model's shared_draft, each of them", unused)

    def _check_draft(self, model: ServiceConfig) -> None:
        if model.shared_draft is None:
            return
        allowed = f"one of drafts ({', '.join(self.drafts) or 'there are none'})"
        _check(model.shared_draft in self.drafts, "shared_draft", allowed, model.shared_draft)
        _check(model.draft is None, "draft", "absent beside shared_draft", model.draft)
        cuts = {each.speculation.q_top_tokens for each in self.models if each.shared_draft == model.shared_draft}
        _check(len(cuts) == 1, "speculation.q_top_tokens", "the same for all models that share a draft", sorted(cuts))

    def draft_of(self, model: ServiceConfig) -> DraftConfig | None:
        """Its own, or the one that it shares."""
        return model.draft if model.shared_draft is None else self.drafts[model.shared_draft]
