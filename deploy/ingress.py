"""The replica that receives clients' calls: an orchestrator and its RPCs, over Serve.

Knows the handles of the deployments. `deploy.app` turns it into a deployment.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ray.serve.handle import DeploymentHandle

from core.config import DraftConfig, ServiceConfig, TargetConfig, TracingConfig
from core.errors import StartupError, Unavailable
from core.ports import Clock
from core.records import Adapter, ModelInfo
from core.speculation import EXTRA_DRAFT
from deploy.api import Authenticator, Hosted, Models, Offload, Served, sampling_defaults, tokens_path
from deploy.clock import MonotonicClock
from deploy.grpc import Servicer
from deploy.http import Call, Head, HttpServicer
from deploy.logs import log_with_serve
from deploy.metrics import ORCHESTRATOR_CATALOGUE, Meters, ServeRecorder
from deploy.serve import AdapterList, ServeLeases, replicas_now
from deploy.spans import open_tracing
from orchestrator.service import Service
from orchestrator.text import Tokenizer
from workers.grammar import Grammars
from workers.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from deploy.spans.tracing import Tracing

logger = logging.getLogger(__name__)

DESCRIBE_RETRY_S = 0.5
DRAFT_GRACE_S = 60.0
"""Seconds that requests wait for a loading draft; after that they run without it until it is ready."""
CONTROL_PERIOD_S = 1.0
"""Seconds between updates of gauges. Ray exports them every ten seconds and drops those older than twenty."""

WAIT_REPORT_PERIOD_S = 5.0
"""Seconds between reports of waiting times to the autoscaling of drafts."""
DRAIN_PERIOD_S = 2.0
"""Seconds between checks for stopping replicas, and for adapters that another orchestrator has loaded or unloaded."""
YOUNG_OBJECTS = 20_000
"""New objects between two of Python's garbage collections. The default of 700 means a collection every round or two."""


@dataclass(frozen=True, slots=True)
class Member:
    """One model of the fleet: its settings, and the handles of its deployments."""

    config: ServiceConfig
    """Includes the draft that the model uses, its own or a shared one."""
    target: DeploymentHandle
    draft: DeploymentHandle | None
    extra_drafts: Sequence[DeploymentHandle] = ()


class Ingress(Servicer):
    """One orchestrator. Serve sends it requests only after every target has been loaded.

    Raises: ConfigError if the tokens file has no token, or if tracing is enabled without its packages; CheckpointError
    if a target's directory has no usable tokenizer or generation_config.
    """

    # Serve awaits an async constructor, and routes nothing to the replica until it returns.
    async def __init__(  # type: ignore[misc]  # mypy allows no async constructor
        self,
        members: Sequence[Member],
        tokens_file: str | None = None,
        json_logs: bool = False,
        tracing: TracingConfig | None = None,
    ) -> None:
        log_with_serve(is_json=json_logs)
        clock = MonotonicClock()
        authenticator = Authenticator(tokens_path(tokens_file))
        traced = open_tracing(tracing or TracingConfig(), clock.now)
        self._hosts = [await _Host.of(member, clock, traced) for member in members]
        self._drain_watch = asyncio.create_task(_watch_replicas(self._hosts, clock))
        models, offload = Models([host.hosted for host in self._hosts]), Offload()
        super().__init__(models, clock, authenticator, offload)
        self._http = HttpServicer(models, clock, authenticator, offload)
        _collect_less_often()
        draft_tasks = [task for host in self._hosts for task in host.draft_tasks]
        if draft_tasks:
            await asyncio.wait(draft_tasks, timeout=DRAFT_GRACE_S)

    async def http(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """The reply to an HTTP call, for `deploy.http.proxy`."""
        async with aclosing(self._http.respond(call)) as parts:
            async for part in parts:
                yield part


class _AdapterStore:
    """Adapters of one model: checked by its targets, listed for all orchestrators. Implements `AdapterStore`."""

    def __init__(self, leases: ServeLeases, target: DeploymentHandle, base: str) -> None:
        self._leases = leases
        self._list = AdapterList(target.deployment_id.app_name, target.deployment_name, base)
        self.listed = self._list.read
        self.unload = self._list.remove

    async def load(self, adapter: Adapter) -> None:
        await self._list.add(await self._leases.load_adapter(adapter))


class _Host:
    """One model behind this orchestrator, and its background tasks."""

    def __init__(
        self,
        member: Member,
        target_info: ModelInfo,
        leases: ServeLeases,
        clock: Clock,
        grammars: Grammars | None,
        tracing: Tracing | None,
    ) -> None:
        config = member.config
        tokenizer = Tokenizer.from_directory(config.target.engine.model)
        defaults = sampling_defaults(config.target.engine.model)
        self._service = Service(config, target_info, None, tokenizer, leases, clock, grammars=grammars)
        self.leases = leases
        self._config = config
        self._clock = clock
        self._deployments = _deployments(member)
        recorder = ServeRecorder(config.model_name, ORCHESTRATOR_CATALOGUE, config.speculation.max_draft_tokens)
        meters = Meters(recorder, clock.now)
        self.hosted = Hosted(self._service, Served(target_info, None, tokenizer, defaults, config), meters, tracing)
        self.hosted.target_stats = leases.target_stats
        if config.http.load_adapters:
            self.hosted.adapter_store = _AdapterStore(leases, member.target, target_info.digest)
        self._tasks = [asyncio.create_task(self._watch_control())]
        if config.draft is not None and config.draft.autoscaling is not None:
            self._tasks.append(asyncio.create_task(self._report_waits()))
        self.draft_tasks = [
            asyncio.create_task(self._attach_draft(number, draft)) for number, draft in enumerate(_drafts(config))
        ]
        """One task for each draft, done when the draft has been described. Requests do not wait for them."""

    @classmethod
    async def of(cls, member: Member, clock: Clock, tracing: Tracing | None = None) -> _Host:
        """Returns as soon as the target is loaded."""
        config = member.config
        handles = [member.draft, *member.extra_drafts] if member.draft is not None else []
        drafts = [(handle, draft.engine.link_tls) for handle, draft in zip(handles, _drafts(config), strict=True)]
        leases = ServeLeases(member.target, drafts, config.limits, target_tls=config.target.engine.link_tls)
        info = await _described(leases.describe_target)
        return cls(member, info, leases, clock, Grammars.of_service(config, info), tracing)

    def count_replicas(self, num_running: Mapping[str, int]) -> None:
        """Publish the number of running replicas; `num_running` is by deployment name."""
        self.hosted.num_replicas = {role: num_running.get(name, 0) for role, name in self._deployments.items()}

    async def _attach_draft(self, number: int, draft: DraftConfig) -> None:
        info = await _described(partial(self.leases.describe_draft, number))
        problem = await asyncio.to_thread(_vocabulary_mismatch, self._config.target, draft)
        problem = problem or self.hosted.served.target.draft_problem(info)
        if problem is not None:
            logger.error("%s is served without its draft %s: %s", self._config.model_name, draft.engine.model, problem)
            return
        self._service.use_draft(info, number)
        if not number:
            self.hosted.show_draft(info)

    async def _watch_control(self) -> NoReturn:
        while True:
            await self._clock.sleep(CONTROL_PERIOD_S)
            try:
                self._show_control()
            except Exception:
                logger.exception("the metrics of control could not be updated")

    def _show_control(self) -> None:
        meters = self.hosted.meters
        meters.observe_control(self._service.report())
        meters.observe_queue(self._service.queue_report())
        meters.observe_links(self.leases.link_troubles)
        if self._config.draft is not None:
            is_ready = self.hosted.served.draft is not None
            meters.observe_draft(is_ready=is_ready, num_drafted=self._service.num_drafted)

    async def _report_waits(self) -> NoReturn:
        """Report only while sessions use the draft: a call would restart a draft that was scaled to zero."""
        reported = self._service.draft_wait
        while True:
            await self._clock.sleep(WAIT_REPORT_PERIOD_S)
            if not self._service.num_drafted:
                continue
            now = self._service.draft_wait
            try:
                await self.leases.report_wait(now - reported)
                reported = now
            except Unavailable as error:
                logger.info("waiting times could not be reported to the draft's autoscaling: %s", error)


async def _watch_replicas(hosts: Sequence[_Host], clock: Clock) -> NoReturn:
    """Move sessions away from replicas that are about to stop, so that these need not wait; count the running ones."""
    while True:
        await clock.sleep(DRAIN_PERIOD_S)
        try:
            stopping, num_running = await replicas_now()
            for host in hosts:
                host.leases.leave(stopping)
                host.count_replicas(num_running)
                await host.hosted.look_for_adapters()
        except Exception:
            logger.exception("the replicas could not be listed")


def _drafts(config: ServiceConfig) -> list[DraftConfig]:
    """All drafts of the model, the main one first."""
    return [config.draft, *config.extra_drafts] if config.draft is not None else []


def _deployments(member: Member) -> dict[str, str]:
    """Names of a model's deployments by role."""
    extra = {f"{EXTRA_DRAFT}{number}": handle for number, handle in enumerate(member.extra_drafts, 2)}
    handles = {"target": member.target, "draft": member.draft, **extra}
    return {role: handle.deployment_name for role, handle in handles.items() if handle is not None}


def _vocabulary_mismatch(target: TargetConfig, draft: DraftConfig) -> str | None:
    """Why token ids of draft and target do not match, or None. Skipped if the draft's files are not mounted."""
    directory = Path(draft.engine.model)
    if not directory.is_dir():
        return None
    try:
        check_same_vocabulary(Path(target.engine.model), directory)
    except StartupError as error:
        return str(error)
    return None


def _collect_less_often() -> None:
    """Exempt loaded objects from garbage collection: they are never freed, and scanning takes tens of ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


async def _described(describe: Callable[[], Awaitable[ModelInfo]]) -> ModelInfo:
    """The model's description. Waits without limit until the model is loaded."""
    while True:
        try:
            return await describe()
        except Unavailable as error:
            logger.info("waiting for a model: %s", error)
            await asyncio.sleep(DESCRIBE_RETRY_S)
