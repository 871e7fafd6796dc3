"""The one place of composition: from a configuration to a Serve application of target, draft and orchestrator.

`import_path: deploy.app:build` with the settings as `args` deploys it from a Serve YAML; `run` deploys it from Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ray import serve
from ray.serve import Application

from core.config import ServiceConfig, WorkerConfig
from core.errors import ConfigError, StartupError
from deploy.ingress import Ingress
from deploy.settings import parse_config
from deploy.workers import HEALTH_TIMEOUT_S, REPLICA_CPUS, DraftWorker, EngineWorker, TargetWorker, bundles
from workers.vocabulary import check_same_vocabulary, read_vocabulary

APPLICATION = "outrider"
STATUS_PERIOD_S = 0.3
ORCHESTRATOR_CPUS = 1.0
"""Ray's logical CPUs for an orchestrator: one busy event loop."""
HEALTH_PERIOD_S = 1.0
"""Serve starts the replacement of a dead replica within this time."""
DRAIN_TIMEOUT_S = 3600.0
"""A replica that is to stop waits this long for its streams or leases to end by themselves."""
SPARE_REQUESTS = 64
"""Room beside the sessions for what is short: health, describe, and requests that are refused at once."""


def build(config: ServiceConfig | Mapping[str, Any]) -> Application:
    """The application that `config`, or the settings of one, describes. Raises: ConfigError."""
    if not isinstance(config, ServiceConfig):
        config = parse_config(config)
    target = worker(TargetWorker, config.target).bind(config.target)
    draft = None
    if config.draft is not None:
        draft = worker(DraftWorker, config.draft).bind(config.draft, config.speculation.q_top_tokens)
    orchestrator = serve.deployment(Ingress).options(
        name="orchestrator",
        num_replicas=config.num_orchestrators,
        ray_actor_options={"num_cpus": ORCHESTRATOR_CPUS},
        max_ongoing_requests=config.limits.max_sessions + SPARE_REQUESTS,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    )
    return orchestrator.bind(config, target, draft)


def worker(kind: type[EngineWorker], config: WorkerConfig) -> Any:
    """The Serve deployment of one engine."""
    return serve.deployment(kind).options(
        name=kind.role,
        num_replicas=config.num_replicas,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=bundles(config),
        max_ongoing_requests=config.max_sessions,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=2 * HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        logging_config={"enable_access_log": False},
    )


def run(config: ServiceConfig, report: Callable[[str], None] = lambda _: None) -> None:
    """Deploy on the cluster that this process is connected to, and return when it serves.

    `report` is told of each deployment that is ready. Raises: StartupError.
    """
    try:
        with _reporting(report):
            serve.run(build(config), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise StartupError(_reason(error)) from error


@contextmanager
def _reporting(report: Callable[[str], None]) -> Iterator[None]:
    """Tell `report`, meanwhile, which deployments have become healthy; `serve.run` itself is silent until the end."""
    is_over = Event()
    watch = Thread(target=_report_health, args=(report, is_over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def _report_health(report: Callable[[str], None], is_over: Event) -> None:
    told: set[str] = set()
    while not is_over.wait(STATUS_PERIOD_S):
        application = serve.status().applications.get(APPLICATION)
        for name, deployment in application.deployments.items() if application else ():
            if deployment.status == "HEALTHY" and name not in told:
                told.add(name)
                report(f"{name} is loaded and warm" if name in ("target", "draft") else f"{name} is ready")


def resources(config: ServiceConfig) -> dict[str, float]:
    """All that the application asks of a cluster, by the names of Ray's resources."""
    total = Counter({"CPU": ORCHESTRATOR_CPUS * config.num_orchestrators})
    for worker_config in filter(None, (config.target, config.draft)):
        for bundle in bundles(worker_config) * worker_config.num_replicas:
            total.update(bundle)
    return dict(total)


def check_pair(config: ServiceConfig) -> None:
    """Find the common mistakes before anything is started. Raises: StartupError."""
    from workers import weights  # imports torch, which replicas of this module's deployments do without

    target = _directory("target", config.target)
    if config.draft is None:
        read_vocabulary(target)
    else:
        check_same_vocabulary(target, _directory("draft", config.draft))
    for worker_config in filter(None, (config.target, config.draft)):
        weights.check(worker_config.engine)


def _directory(name: str, config: WorkerConfig) -> Path:
    path = Path(config.engine.model)
    if not path.is_dir():
        raise ConfigError(f"{name}.engine.model: there is no directory {path}")
    return path


def _reason(error: RuntimeError) -> str:
    """Why a deployment failed, in one line: our own error out of the replica's trace, if there is one."""
    application = serve.status().applications.get(APPLICATION)
    for deployment in application.deployments.values() if application else ():
        ours = [line for line in deployment.message.splitlines() if line.startswith("core.errors.")]
        if ours:
            return str(ours[-1].partition(": ")[2])
    return str(error)
