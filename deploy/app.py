"""Builds the Serve application of targets, drafts and orchestrators from a configuration.

A Serve YAML deploys it by `import_path: deploy.app:build`, with the settings as `args`; Python code uses
`deploy.launch.application`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ray import serve
from ray.serve import Application

from core.config import DraftConfig, FleetConfig, ServiceConfig, TargetConfig
from deploy.engines import REPLICA_CPUS, DraftActor, EngineActor, TargetActor, bundles
from deploy.ingress import Ingress, Member
from deploy.serve import (
    HEALTH_TIMEOUT_S,
    DraftWorker,
    EngineWorker,
    TargetWorker,
    check_devices,
    draft_router,
    most_replicas,
    replicas,
    target_router,
)
from deploy.settings import parse_fleet

logger = logging.getLogger(__name__)

APPLICATION = "outrider"
HEALTH_PERIOD_S = 1.0
"""Seconds between health checks; Serve replaces a dead replica within this time."""
DRAIN_TIMEOUT_S = 3600.0
"""Seconds that a stopping replica waits for its streams or leases to finish."""
SPARE_REQUESTS = 64
"""Concurrent calls allowed beyond the sessions, all short: health, describe, and requests that are refused at once."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The actor class of each role's engine; benchmarks substitute their own."""

    target: type[EngineActor[Any, Any]] = TargetActor
    draft: type[EngineActor[Any, Any]] = DraftActor


ENGINES = Engines()


def build(config: ServiceConfig | FleetConfig | Mapping[str, Any]) -> Application:
    """The Serve application for `config`, given as an object or as settings. Raises: ConfigError.

    Serve calls this function by name and passes exactly one argument.
    """
    return build_with(config, ENGINES)


def build_with(config: ServiceConfig | FleetConfig | Mapping[str, Any], engines: Engines) -> Application:
    """Like `build`, with other engine actors. Raises: ConfigError."""
    fleet = as_fleet(config)
    check_devices(fleet)
    drafts = {
        name: _draft(f"draft-{name}", draft, name, _cut(fleet, name), engines) for name, draft in fleet.drafts.items()
    }
    front = fleet.orchestrator
    orchestrator = serve.deployment(Ingress).options(
        name="orchestrator",
        **replicas(front.num_replicas, front.autoscaling),
        ray_actor_options={"num_cpus": front.num_cpus, "resources": front.resources, "label_selector": front.labels},
        max_surge_percent=front.surge_percent,
        max_ongoing_requests=sum(model.limits.max_sessions + model.limits.max_queued for model in fleet.models)
        + SPARE_REQUESTS,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    )
    members = [_member(fleet, model, drafts, engines) for model in fleet.models]
    return orchestrator.bind(members, front.tokens_file, front.json_logs, front.tracing)


def as_fleet(config: ServiceConfig | FleetConfig | Mapping[str, Any]) -> FleetConfig:
    """`config` as a fleet; a single model becomes a fleet of one. Raises: ConfigError."""
    match config:
        case FleetConfig():
            return config
        case ServiceConfig():
            return FleetConfig((config,), orchestrator=config.orchestrator)
        case _:
            return parse_fleet(config)


def _member(fleet: FleetConfig, model: ServiceConfig, shared: Mapping[str, Application], engines: Engines) -> Any:
    """The deployments of one model. Their names include the model's name if the fleet has several."""
    if (problem := excess_rows(model)) is not None:
        logger.warning("%s: %s", model.model_name, problem)
    suffix = f"-{model.model_name}" if len(fleet.models) > 1 else ""
    targets = worker(TargetWorker, model.target, _name(f"target{suffix}"))
    target = targets.options(request_router_config=target_router()).bind(model.target, model.model_name, engines.target)
    draft, cut = None, model.speculation.q_top_tokens
    if model.shared_draft is not None:
        draft = shared[model.shared_draft]
    elif model.draft is not None:
        draft = _draft(f"draft{suffix}", model.draft, model.model_name, cut, engines)
    extra = [
        _draft(f"draft{number}{suffix}", config, model.model_name, cut, engines)
        for number, config in enumerate(model.extra_drafts, 2)
    ]
    return Member(replace(model, draft=fleet.draft_of(model)), target, draft, extra)  # Serve passes handles instead


def excess_rows(config: ServiceConfig) -> str | None:
    """A warning if the blocks of all sessions exceed one pass of a GPU target, else None.

    A CPU target is not checked: every row costs time there, so blocks stay small.
    """
    target, block = config.target, config.speculation.max_block_tokens
    if target.autoscaling is None or target.engine.device == "cpu":
        return None
    limit, num_rows = target.engine.max_step_tokens, ceil(target.autoscaling.sessions) * (block + 1)
    if num_rows <= limit:
        return None
    return (
        f"target.engine.max_step_tokens ({limit}) has no room for blocks of speculation.max_block_tokens ({block}) of "
        f"all target.autoscaling.sessions ({target.autoscaling.sessions:g}): their {num_rows} rows take "
        f"{ceil(num_rows / limit)} passes, one after the other, where drafting is priced by one. Raise the first, or "
        f"lower one of the others"
    )


def _draft(name: str, config: DraftConfig, model_name: str, q_top_tokens: int, engines: Engines) -> Application:
    """One draft deployment. `model_name` labels its metrics: the model it drafts for, or a shared draft's own name."""
    drafts = worker(DraftWorker, config, _name(name))
    return drafts.options(request_router_config=draft_router()).bind(config, model_name, q_top_tokens, engines.draft)


def _cut(fleet: FleetConfig, draft: str) -> int:
    """Number of tokens to which a shared draft truncates q. All models that share it have the same setting."""
    return next(each.speculation.q_top_tokens for each in fleet.models if each.shared_draft == draft)


def _name(text: str) -> str:
    """`text` as a valid deployment name; a model's name may be a path."""
    return re.sub(r"[^\w.-]", "-", text)


def worker(kind: type[EngineWorker], config: TargetConfig | DraftConfig, name: str = "") -> Any:
    """The Serve deployment of one engine."""
    return serve.deployment(kind).options(
        name=name or kind.role,
        **replicas(config.num_replicas, config.autoscaling),
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=bundles(config),
        placement_group_strategy="PACK",
        placement_group_bundle_label_selector=[config.labels] * len(bundles(config)),
        max_surge_percent=config.surge_percent,
        max_ongoing_requests=config.max_sessions,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=2 * HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        logging_config={"enable_access_log": False},
    )


def resources(config: ServiceConfig | FleetConfig) -> dict[str, float]:
    """The largest resource demand of an application, by Ray's resource names."""
    fleet = as_fleet(config)
    front = fleet.orchestrator
    one = {"CPU": front.num_cpus, **front.resources}
    total: Counter[str] = Counter()
    for bundle in [one] * most_replicas(front.num_replicas, front.autoscaling):
        total.update(bundle)
    own = ((model.target, model.draft, *model.extra_drafts) for model in fleet.models)
    parts = [part for of_model in own for part in of_model if part is not None]
    for part in (*parts, *fleet.drafts.values()):
        for bundle in bundles(part) * most_replicas(part.num_replicas, part.autoscaling):
            total.update(bundle)
    return dict(total)
