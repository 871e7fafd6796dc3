"""Settings of the whole service, and of its deployments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown
from core.config.engine import EngineConfig
from core.config.scaling import DraftScaling, OrchestratorScaling, TargetScaling
from core.config.speculation import SpeculationConfig


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """How many orchestrators there are, and where."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

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
        check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        check(0 <= self.surge_percent <= 100, "surge_percent", "in [0, 100]", self.surge_percent)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How many replicas of an engine there are, and what each asks of the cluster."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

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
        check(self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        check(self.num_cpus >= 0, "num_cpus", "at least 0", self.num_cpus)
        check(self.num_gpus >= 0, "num_gpus", "at least 0", self.num_gpus)
        check(0 <= self.surge_percent <= 100, "surge_percent", "in [0, 100]", self.surge_percent)
        check(self.max_sessions >= 1, "max_sessions", "at least 1", self.max_sessions)


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
class Limits:
    """What one request, and all of them together, may ask for."""

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
    max_tokens_per_minute: int = 0
    """Tokens that one caller may ask one orchestrator for in a minute, prompts and outputs together; 0 sets no limit.
    A request counts with its `max_tokens` until it ends, and with its output after that."""
    retry_after_s: float = 1.0
    """What a refused caller is told to wait at least; more, where the queue is expected to take longer."""
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
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("max_queued", "max_requests_per_minute", "max_tokens_per_minute"):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("max_stop_strings", "max_stop_token_ids", "max_logit_bias", "max_logprobs", "max_target_retries"):
            check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check(self.drain_grace_s >= 0, "drain_grace_s", "at least 0", self.drain_grace_s)
        for name in ("retry_after_s", "lease_timeout_s", "reply_timeout_s"):
            check(getattr(self, name) > 0, name, "positive", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One served pair: a target, perhaps a draft, and the orchestrators in front of them."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

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
        check(bool(self.model_name), "model_name", "not empty", self.model_name)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Several models behind the same orchestrators; requests choose by `model`, and get the first without it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    models: tuple[ServiceConfig, ...]
    """Each with its target, and a draft of its own or a shared one."""
    drafts: dict[str, DraftConfig] = field(default_factory=dict)
    """That models may share, by name; their vocabulary must be that of each target."""
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
        """Its own, or the one that it shares."""
        return model.draft if model.shared_draft is None else self.drafts[model.shared_draft]
