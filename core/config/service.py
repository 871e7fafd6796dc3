"""Settings of the whole service, and of its deployments."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.config.checks import Settings, at_least, check
from core.config.engine import EngineConfig
from core.config.http import HttpConfig
from core.config.limits import Limits
from core.config.scaling import DraftScaling, OrchestratorScaling, TargetScaling
from core.config.speculation import SpeculationConfig
from core.config.tiers import ServiceTiers
from core.config.tracing import TracingConfig
from core.ranges import Range

MAX_EXTRA_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class OrchestratorConfig(Settings):
    """Number and placement of orchestrators."""

    num_replicas: int = 1
    """Number of orchestrators, at least 1; not used with `autoscaling`. Raise it where an orchestrator's CPU is the
    bottleneck."""
    num_cpus: float = 1.0
    """Logical CPUs that Ray reserves for each orchestrator, at least 0. An orchestrator is one event loop and needs no
    more than 1; lower it where orchestrators are mostly idle."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts of custom Ray resources reserved for each orchestrator, for example {"frontend": 1}. Set it to choose the
    nodes of orchestrators."""
    labels: dict[str, str] = field(default_factory=dict)
    """Ray label selector for the nodes of orchestrators, for example {"zone": "in(a,b)"}. Set it to choose those
    nodes."""
    surge_percent: int = 25
    """Number of new replicas that an update starts before old ones stop, in percent of the number of replicas, in
    [0, 100], rounded up. Set 0 where the cluster has no room for one more replica: old ones then stop first."""
    autoscaling: OrchestratorScaling | None = None
    """Bounds and signals of autoscaling; None keeps `num_replicas`. Set it where the load varies over the day."""
    tokens_file: str | None = None
    """Path of a file of keys; callers must send one of them as metadata `authorization: Bearer KEY`. Each line is
    NAME:SHA256, perhaps with limits of this caller's own (:max_priority=N:max_requests_per_minute=N
    :max_tokens_per_minute=N:max_sessions=N), its tenant (:tenant=NAME), and :learning=no if nothing of its requests may
    be kept for training drafts, as printed by `outrider keys new NAME`;
    several lines with one name are keys of the same caller. A line without a colon is a plain token. Changes of the
    file apply at once. With None, and without the environment variable OUTRIDER_TOKENS_FILE, every caller is served.
    Set it where others can reach the ports."""
    json_logs: bool = False
    """Whether to log JSON to standard output, one object a line with request id and trace id, in place of text in
    Serve's log. Neither log contains prompts or outputs. Set it where a collector reads the logs."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """OpenTelemetry spans of requests; off unless an endpoint is set."""

    def __post_init__(self) -> None:
        self._check(at_least(1), "num_replicas")
        self._check(at_least(0), "num_cpus")
        self._check(Range(0, 100), "surge_percent")


@dataclass(frozen=True, slots=True)
class WorkerConfig(Settings):
    """Number of replicas of an engine, and what each needs of the cluster."""

    engine: EngineConfig
    num_replicas: int = 1
    """Number of replicas, at least 1; not used with `autoscaling`. Raise it for more sessions or throughput."""
    num_cpus: float = 1.0
    """Logical CPUs that Ray reserves for each rank of an engine, at least 0. Set it to the engine's `num_threads` where
    engines share a node."""
    num_gpus: float = 0.0
    """GPUs that Ray reserves for each rank of an engine, at least 0. Set 1 for an engine on a GPU, or a fraction where
    several engines share one."""
    resources: dict[str, float] = field(default_factory=dict)
    """Amounts of custom Ray resources reserved for each rank of an engine, for example {"small_gpu": 1}. Set it to
    choose the engine's nodes."""
    labels: dict[str, str] = field(default_factory=dict)
    """Ray label selector for the engine's nodes, for example {"zone": "in(a,b)"}. Set it to choose those nodes."""
    surge_percent: int = 25
    """Number of new replicas that an update starts before old ones stop, in percent of the number of replicas, in
    [0, 100], rounded up. Set 0 where the cluster has no room for one more replica: old ones then stop first."""
    max_sessions: int = 256
    """Largest number of sessions (leases) on one replica, at least 1; further ones wait. Lower it where the KV cache is
    too small for the contexts of that number of sessions."""

    def __post_init__(self) -> None:
        self._check(at_least(1), "num_replicas", "max_sessions")
        self._check(at_least(0), "num_cpus", "num_gpus")
        self._check(Range(0, 100), "surge_percent")


@dataclass(frozen=True, slots=True)
class TargetConfig(WorkerConfig):
    """The engines that verify."""

    autoscaling: TargetScaling | None = None
    """Bounds and signals of autoscaling; None keeps `num_replicas`. Set it where the load varies over the day."""

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)  # a class with slots has no super() without arguments
        check(self.engine.layers is None, "engine.layers", "absent: a target has to be whole", self.engine.layers)
        num_ahead = self.engine.cascade_tokens
        check(num_ahead == 0, "engine.cascade_tokens", "0, since only drafts guess", num_ahead)


@dataclass(frozen=True, slots=True)
class DraftConfig(WorkerConfig):
    """The engines that guess."""

    autoscaling: DraftScaling | None = None
    """Bounds and signals of autoscaling; None keeps `num_replicas`. Set it where the load varies over the day."""
    follows_link: bool = False
    """Whether to load another checkpoint while the service runs, when the symbolic link that `engine.model` names is
    switched to it. Streams go on without this draft for the seconds that loading takes. A checkpoint that cannot be
    loaded is left. Set it for a draft that `outrider learn` trains (docs/howto/learn-from-traffic.md)."""

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)  # a class with slots has no super() without arguments
        engine = self.engine
        check(not engine.feature_layers, "engine.feature_layers", "empty: a target has them", engine.feature_layers)
        check(not engine.adapters, "engine.adapters", "empty: only targets have adapters", list(engine.adapters))
        buffer = engine.learning_buffer
        check(buffer is None, "engine.learning_buffer", "absent: a target collects", buffer)
        if engine.head is None:
            return
        check(engine.layers is None, "engine.layers", "absent beside a head", engine.layers)
        check(engine.cascade_tokens == 0, "engine.cascade_tokens", "0 beside a head", engine.cascade_tokens)
        check(engine.kv_dtype is None, "engine.kv_dtype", "absent beside a head, whose KV keeps dtype", engine.kv_dtype)
        num_ranks = engine.tensor_parallel
        check(num_ranks == 1, "engine.tensor_parallel", "1 beside a head", num_ranks)


@dataclass(frozen=True, slots=True)
class ServiceConfig(Settings):
    """One served pair: a target, perhaps a draft, and the orchestrators in front of them."""

    target: TargetConfig
    draft: DraftConfig | None = None
    """The engines that draft; None serves plain decoding, without speculation."""
    extra_drafts: tuple[DraftConfig, ...] = ()
    """Up to 3 more drafts, of other models, whose guesses are merged with those of `draft` into one tree
    (docs/howto/several-drafts.md). Each has its own replicas, without autoscaling. Add one where another kind of draft
    guesses what the first one misses, and more rows cost the target little."""
    shared_draft: str | None = None
    """Name of an entry of the fleet's `drafts`, used in place of `draft`; models with the same name share its replicas.
    Set it where several targets have the same vocabulary."""
    model_name: str = "outrider-demo"
    """Name of this pair in requests, in metrics and in the list of models; not empty. Set it to what callers send as
    `model`."""
    close_schemas: bool = True
    """Whether an object schema that lists `properties` and does not say `additionalProperties` allows only those. JSON
    schema allows any others, which most callers do not mean and small models keep adding; other servers close such
    schemas, too. A caller opens one with `"additionalProperties": true`. Schemas without `properties`, and those that
    are combined with others that may list some, stay open. Unset it where callers rely on the standard."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    limits: Limits = field(default_factory=Limits)
    tiers: ServiceTiers = field(default_factory=ServiceTiers)
    http: HttpConfig = field(default_factory=HttpConfig)

    def __post_init__(self) -> None:
        check(bool(self.model_name), "model_name", "not empty", self.model_name)
        is_new = self.model_name not in self.target.engine.adapters
        check(is_new, "target.engine.adapters", "of other names than model_name", self.model_name)
        self._check_extra_drafts()

    def _check_extra_drafts(self) -> None:
        extra = self.extra_drafts
        check(len(extra) <= MAX_EXTRA_DRAFTS, "extra_drafts", f"at most {MAX_EXTRA_DRAFTS}", len(extra))
        has_first = self.draft is not None or self.shared_draft is not None
        check(has_first or not extra, "extra_drafts", "empty without a draft or a shared_draft", len(extra))
        scaled = [number for number, each in enumerate(extra) if each.autoscaling is not None]
        check(not scaled, "extra_drafts", "without autoscaling, which looks at the first draft alone", scaled)


@dataclass(frozen=True, slots=True)
class FleetConfig(Settings):
    """Several models behind the same orchestrators; a request selects one by its field `model`."""

    models: tuple[ServiceConfig, ...]
    """The pairs, at least one, with different `model_name`s. Requests without `model` get the first one."""
    drafts: dict[str, DraftConfig] = field(default_factory=dict)
    """Drafts that several models share, by name. A draft and all targets that use it must have the same vocabulary."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)

    def __post_init__(self) -> None:
        check(bool(self.models), "models", "at least one", ())
        names = [model.model_name for model in self.models]
        check(len(set(names)) == len(names), "models", "of different model_name", names)
        names += [name for model in self.models for name in model.target.engine.adapters]
        check(len(set(names)) == len(names), "models", "of different names, those of target.engine.adapters too", names)
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
        """The model's own draft, or the shared one that it names; None without a draft."""
        return model.draft if model.shared_draft is None else self.drafts[model.shared_draft]
