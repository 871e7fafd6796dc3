"""Settings of the whole service, and of its deployments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown
from core.config.engine import EngineConfig
from core.config.http import HttpConfig
from core.config.scaling import DraftScaling, OrchestratorScaling, TargetScaling
from core.config.speculation import SpeculationConfig
from core.config.tracing import TracingConfig
from core.ranges import PRIORITY

MAX_GRAMMAR_BYTES = 256 * 1024
"""Largest value of the setting: the stack on which grammars are compiled is made for texts up to this length
(workers/grammar/deep_stack.py)."""


MAX_EXTRA_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """Number and placement of orchestrators."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    num_replicas: int = 1
    """Number of orchestrators, at least 1, unless `autoscaling` is set."""
    num_cpus: float = 1.0
    """Ray's logical CPUs for one orchestrator, at least 0. It is one busy event loop, so 1 fits."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts of custom Ray resources that its node must have free (for example {"frontend": 1})."""
    labels: dict[str, str] = field(default_factory=dict)
    """Ray labels that its node must have, as Ray's label selectors say it (for example {"zone": "in(a,b)"})."""
    surge_percent: int = 25
    """New replicas that start before old ones stop in an update, in percent of the wanted number, in [0, 100], rounded
    up. Set 0 where the cluster has no room for one more: then old ones stop first."""
    autoscaling: OrchestratorScaling | None = None
    """Bounds and signals of autoscaling; None keeps `num_replicas`."""
    tokens_file: str | None = None
    """Path of a file of keys; callers must send one of them as metadata `authorization: Bearer KEY`. A line is
    NAME:SHA256, or NAME:SHA256:max_priority=N, as `outrider keys new NAME` prints it; lines of one name are keys of one
    caller. A line without a colon is a token as it is sent. The file is read again when it changes. With None, and
    without OUTRIDER_TOKENS_FILE in the environment, everybody is served."""
    json_logs: bool = False
    """Whether to log one JSON object a line to standard output, with request id and trace id, instead of text to
    Serve's log. Neither contains prompts or output."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """OpenTelemetry's spans; off unless an endpoint is set."""

    def __post_init__(self) -> None:
        check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        check(0 <= self.surge_percent <= 100, "surge_percent", "in [0, 100]", self.surge_percent)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Number of replicas of an engine, and what each asks of the cluster."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    engine: EngineConfig
    num_replicas: int = 1
    """Number of replicas, at least 1, unless `autoscaling` is set."""
    num_cpus: float = 1.0
    """Ray's logical CPUs for one engine actor, at least 0. Set it to the engine's `num_threads` where engines share a
    node."""
    num_gpus: float = 0.0
    """GPUs for each rank of one engine, at least 0; a fraction shares a GPU."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts of custom Ray resources that the engine's node must have free (for example {"small_gpu": 1})."""
    labels: dict[str, str] = field(default_factory=dict)
    """Ray labels that the engine's node must have, as Ray's label selectors say it (for example {"zone":
    "in(a,b)"})."""
    surge_percent: int = 25
    """New replicas that start before old ones stop in an update, in percent of the wanted number, in [0, 100], rounded
    up. Set 0 where the cluster has no room for one more: then old ones stop first."""
    max_sessions: int = 256
    """Most leases that one replica grants, at least 1. Lower it where KV does not hold the contexts of that number of
    sessions."""

    def __post_init__(self) -> None:
        check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        check(self.num_gpus >= 0, "num_gpus", "at least 0", self.num_gpus)
        check(0 <= self.surge_percent <= 100, "surge_percent", "in [0, 100]", self.surge_percent)
        check(self.max_sessions >= 1, "max_sessions", "at least 1", self.max_sessions)


@dataclass(frozen=True, slots=True)
class TargetConfig(WorkerConfig):
    """The engines that verify."""

    autoscaling: TargetScaling | None = None
    """Bounds and signals of autoscaling; None keeps `num_replicas`."""

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)  # a class with slots has no super() without arguments
        check(self.engine.layers is None, "engine.layers", "absent: a target has to be whole", self.engine.layers)
        num_ahead = self.engine.cascade_tokens
        check(num_ahead == 0, "target.engine.cascade_tokens", "0, since only drafts guess", num_ahead)


@dataclass(frozen=True, slots=True)
class DraftConfig(WorkerConfig):
    """The engines that guess."""

    autoscaling: DraftScaling | None = None
    """Bounds and signals of autoscaling; None keeps `num_replicas`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of all requests together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    max_sessions: int = 128
    """Completions in progress on one orchestrator; more wait in its queue."""
    max_queued: int = 128
    """Completions that wait for a place on one orchestrator, at least 0; more are refused at once, of the least
    priority and of the caller with most first. 0 refuses whatever finds no place, which suits callers that try
    elsewhere. Raise it where bursts are long and callers patient."""
    max_requests_per_minute: int = 0
    """Completions that one caller may ask one orchestrator for in a minute; 0 sets no limit. Callers are told apart by
    the token that they send; without tokens all are one."""
    max_priority: int = 0
    """The most urgent priority that a caller may ask for, in [-2147483648, 2147483647]; requests with a lower number,
    which would be served before, are refused. A caller's key may say another (`tokens_file`). Lower it where all
    callers are trusted to say what is urgent."""
    max_tokens_per_minute: int = 0
    """Tokens that one caller may ask one orchestrator for in a minute, prompts and outputs together; 0 sets no limit.
    A request counts with its `max_tokens` until it ends, and with its output after that."""
    retry_after_s: float = 1.0
    """What a refused caller is told to wait at least; more, where the queue is expected to take longer."""
    default_max_tokens: int = 256
    """Most tokens of output for a request that names no limit, at least 1."""
    max_stop_strings: int = 16
    """Most stop strings of a request, at least 0."""
    max_stop_chars: int = 256
    """Most characters of a stop string, at least 1. Text that may begin a stop string is held back, so long stop
    strings delay output."""
    max_stop_token_ids: int = 128
    """Most stop token ids of a request, at least 0."""
    max_logit_bias: int = 512
    """Most tokens of a request with a logit bias, at least 0."""
    max_allowed_token_ids: int = 4096
    """Most ids of a request in `allowed_token_ids`, at least 0."""
    max_bad_words: int = 128
    """Most bad words of a request, strings and sequences of ids together, at least 0."""
    max_bad_word_tokens: int = 64
    """Most tokens of a bad word, at least 0."""
    max_logprobs: int = 20
    """Most alternatives for each token with their log probabilities, at least 0. Each costs bandwidth and time of the
    target."""
    max_scored_tokens: int = 4096
    """Most tokens of a prompt whose own log probabilities are reported, at least 0. Each costs a row of logits, and a
    hundred bytes or more of the reply."""
    max_grammar_bytes: int = 64 * 1024
    """Longest JSON schema, regular expression, grammar or list of choices for structured output, in bytes, in
    [0, 262144]; 0 refuses all of them. Raise it where schemas are large: each may take a fraction of a second of a
    processor."""
    max_message_bytes: int = 4 * 1024 * 1024
    """Longest request in bytes, at least 1; longer ones are refused unread. Raise it where prompts of more characters
    are sent."""
    max_target_retries: int = 4
    """Losses of the target in a row, without a token in between, after which a completion fails; at least 0. Raise it
    where targets take long to be replaced."""
    drain_grace_s: float = 30.0
    """Seconds, at least 0, for which a completion stays on a target that is about to stop before it moves to another.
    Keep it below the time that Kubernetes gives a pod to end."""
    lease_timeout_s: float = 30.0
    """Seconds, above 0, that a session waits for a replica to take it before it fails. Raise it where replicas start
    from 0."""
    reply_timeout_s: float = 60.0
    """Seconds, above 0, without an answer to a call after which an engine counts as lost. Keep it above the duration of
    the longest prefill."""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "default_max_tokens", "max_stop_chars", "max_message_bytes"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("max_queued", "max_requests_per_minute", "max_tokens_per_minute"):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check(self.max_priority in PRIORITY, "max_priority", str(PRIORITY), self.max_priority)
        counts = ("max_stop_strings", "max_stop_token_ids", "max_logit_bias", "max_allowed_token_ids", "max_bad_words")
        for name in (
            *counts,
            "max_bad_word_tokens",
            "max_logprobs",
            "max_scored_tokens",
            "max_target_retries",
        ):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        is_allowed = 0 <= self.max_grammar_bytes <= MAX_GRAMMAR_BYTES
        check(is_allowed, "max_grammar_bytes", f"in [0, {MAX_GRAMMAR_BYTES}]", self.max_grammar_bytes)
        check(self.drain_grace_s >= 0, "drain_grace_s", "at least 0", self.drain_grace_s)
        for name in ("retry_after_s", "lease_timeout_s", "reply_timeout_s"):
            check(getattr(self, name) > 0, name, "positive", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One served pair: a target, perhaps a draft, and the orchestrators in front of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    target: TargetConfig
    draft: DraftConfig | None = None
    """The engines that draft; None serves plain decoding."""
    extra_drafts: tuple[DraftConfig, ...] = ()
    """Further engines that draft beside `draft`, at most 3, of different models: the guesses of all of them meet in one
    tree (docs/howto/several-drafts.md). Each has replicas of its own, whose number is fixed. Add one where another kind
    of draft guesses what the first one misses, and the target has rows to spare."""
    shared_draft: str | None = None
    """Name of a draft in the fleet's `drafts`, in place of `draft`; all models that name it share its replicas."""
    model_name: str = "outrider-demo"
    """Name of this pair in requests, in metrics and in the list of models; not empty."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    limits: Limits = field(default_factory=Limits)
    http: HttpConfig = field(default_factory=HttpConfig)

    def __post_init__(self) -> None:
        check(bool(self.model_name), "model_name", "not empty", self.model_name)
        self._check_extra_drafts()

    def _check_extra_drafts(self) -> None:
        extra = self.extra_drafts
        check(len(extra) <= MAX_EXTRA_DRAFTS, "extra_drafts", f"at most {MAX_EXTRA_DRAFTS}", len(extra))
        has_first = self.draft is not None or self.shared_draft is not None
        check(has_first or not extra, "extra_drafts", "empty without a draft or a shared_draft", len(extra))
        scaled = [number for number, each in enumerate(extra) if each.autoscaling is not None]
        check(not scaled, "extra_drafts", "without autoscaling, which looks at the first draft alone", scaled)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Several models behind the same orchestrators; requests choose by `model`, and get the first without it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    models: tuple[ServiceConfig, ...]
    """The pairs, at least one, each with a `model_name` of its own. A request chooses by `model`, and gets the first
    without."""
    drafts: dict[str, DraftConfig] = field(default_factory=dict)
    """Drafts that several models may share, by name. The vocabulary of each must be that of every target that uses
    it."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)

    def __post_init__(self) -> None:
        check(bool(self.models), "models", "at least one", ())
        names = [model.model_name for model in self.models]
        check(len(set(names)) == len(names), "models", "of different model_name", names)
        for model in self.models:
            self._check_draft(model)
        unused = [name for name in self.drafts if name not in {model.shared_draft for model in self.models}]
        check(not unused, "drafts", "named by a model's shared_draft, each of them", unused)

    def _check_draft(self, model: ServiceConfig) -> None:
        if model.shared_draft is None:
            return
        allowed = f"one of drafts ({', '.join(self.drafts) or 'there are none'})"
        check(model.shared_draft in self.drafts, "shared_draft", allowed, model.shared_draft)
        check(model.draft is None, "draft", "absent beside shared_draft", model.draft)
        cuts = {each.speculation.q_top_tokens for each in self.models if each.shared_draft == model.shared_draft}
        check(len(cuts) == 1, "speculation.q_top_tokens", "the same for all models that share a draft", sorted(cuts))

    def draft_of(self, model: ServiceConfig) -> DraftConfig | None:
        """The model's own draft, or the shared one that it names."""
        return model.draft if model.shared_draft is None else self.drafts[model.shared_draft]
