"""The control plane: Serve deployments of target and draft, whose replicas own one engine each and grant leases on it.

Knows the life cycle of Serve's replicas, and the engine actors; the requests of sessions never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group

from core.config import DraftConfig, EngineConfig, WorkerConfig
from core.errors import OutriderError, WorkerLost
from core.records import Adapter, ModelInfo
from core.text import BlockHash
from deploy.engines import DraftActor, EngineActor, Incarnation, TargetActor, cause_of_death, placement
from deploy.link.address import LinkAddress
from deploy.logs import log_with_serve
from deploy.metrics import ENGINE_CATALOGUE, EngineMeter, ServeRecorder
from deploy.serve.adapters import AdapterList, LoadedAdapters
from deploy.serve.autoscaling import BUSY, KV_USE, ROUND_S, WAITED_S
from deploy.serve.followed import FollowedCheckpoint

if TYPE_CHECKING:
    from core.records import EngineStats

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 15.0
"""Seconds, longer than any step of an engine; Serve replaces a replica whose engine misses this three times."""
METRICS_PERIOD_S = 5.0
"""Seconds between reports, and between checks for unloaded adapters; Ray passes metrics on every ten seconds."""
MAX_LOADS = 6
"""Attempts to load an engine that dies while it loads. Then the replica ends, and Serve starts another."""
LOAD_WAIT_S = 1.0
"""Seconds that a lease waits at a replica whose engine loads, before its session tries another."""
NEW_CHECKPOINT = "another checkpoint is to be served"
"""Cause of an engine's end that is no death."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The first message of a lease: the engine that takes the session's requests."""

    engine_id: str
    epoch: int
    engine: Any
    """Handle of the engine actor."""
    replica_id: str
    """Serve's name of the replica that owns the engine."""
    link: LinkAddress
    """Address of the engine's link."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The only message of a refused lease."""

    replica_id: str
    reason: str = "an engine is loading"


class EngineWorker(ABC):
    """A replica that owns one engine, of one rank or more, and starts another in its place when it dies.

    Invariant: whatever ends a lease, the engine then frees its session.
    """

    role: ClassVar[str]

    # Serve awaits an async constructor, and routes nothing to the replica until it returns.
    async def __init__(  # type: ignore[misc]  # mypy allows no async constructor
        self, config: WorkerConfig, model_name: str, actor: type[EngineActor[Any, Any]], *arguments: Any
    ) -> None:
        """`model_name` labels the engine's metrics: the name of the model in requests."""
        log_with_serve()
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        place = partial(placement, config, get_current_placement_group())
        self._begin_life: Callable[[EngineConfig], Incarnation] = lambda engine: Incarnation(
            self.role, actor, engine, place, *arguments
        )
        follows_link = isinstance(config, DraftConfig) and config.follows_link
        self._checkpoint = FollowedCheckpoint(config.engine.model, follows_link=follows_link)
        engine = self._checkpoint.settings(config.engine)
        self._current = self._begin_life(engine)
        self._info = await self._current.load()
        self._checkpoint.has_loaded(engine)
        self._findings = self._current.findings
        self._is_loaded = asyncio.Event()
        self._is_loaded.set()
        listed, kept = AdapterList(context.app_name, context.deployment, self._info.digest), self._info.adapters
        self._adapters = LoadedAdapters(listed, [adapter.digest for adapter in kept])
        self._num_leases = 0
        self._meter = EngineMeter(ServeRecorder(model_name, ENGINE_CATALOGUE))
        self._ended: asyncio.Queue[str] = asyncio.Queue()
        # Tasks of the replica itself, because a call made by a lease may be cancelled together with the lease.
        lives = (self._release_ended(), self._replace_dead(), self._record_metrics())
        self._tasks = [asyncio.create_task(life) for life in lives]

    async def lease(
        self,
        session: str,
        prefix: tuple[BlockHash, ...] = (),  # noqa: ARG002
        refused_by: Collection[str] = (),
        adapter: Adapter | None = None,
    ) -> AsyncIterator[LeaseGrant | Refusal]:
        """One grant, and then nothing until the lease ends or the engine dies; `session` is unique to this lease.

        While the engine loads, a session is refused at once, so that it can try another replica; if this replica has
        refused it before, it waits for a short time first. An `adapter` that the engine lacks is loaded. `prefix` and
        `refused_by` are for `deploy.serve.routing`. Serve bounds the leases: further sessions wait in the router.
        """
        if self._replica_id in refused_by:
            await self._wait_for_engine()
        if not self._is_loaded.is_set():
            yield Refusal(self._replica_id)
            return
        current = self._current
        self._num_leases += 1
        try:
            async with self._adapters.leased(current, adapter):
                yield LeaseGrant(current.engine_id, current.epoch, current.engine, self._replica_id, current.link)
                await current.end()
        except OutriderError as error:
            yield Refusal(self._replica_id, str(error))
        finally:
            self._num_leases -= 1
            self._ended.put_nowait(session)

    async def describe(self) -> ModelInfo:
        return self._info

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Check an adapter by loading it here. Returns it, with its digest. Raises: StartupError; WorkerLost."""
        return await self._adapters.load(self._current, adapter)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The signals for autoscaling. Serve calls this every few seconds if the deployment scales."""
        stats = await self._stats()
        return self._measure(stats) if stats is not None else {}

    @abstractmethod
    def _measure(self, stats: EngineStats) -> dict[str, float]:
        """The signals for `deploy.serve.autoscaling`."""

    async def check_health(self) -> None:
        """Check, for Serve, that the engine answers. Raises: TimeoutError if not; Serve acts on the third."""
        if not self._is_loaded.is_set():
            return
        current = self._current
        try:
            await asyncio.wait_for(current.engine.ready.remote(), HEALTH_TIMEOUT_S)
        except (WorkerLost, RayError) as error:
            current.fail(cause_of_death(error))

    async def _wait_for_engine(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_loaded.wait(), LOAD_WAIT_S)

    async def _stats(self) -> EngineStats | None:
        """The engine's statistics; None while it loads or if it does not answer."""
        if not self._is_loaded.is_set():
            return None
        try:
            stats: EngineStats = await self._current.engine.stats.remote()
        except (RayError, WorkerLost) as error:  # `_replace_dead` handles its death
            logger.warning("%s does not report its statistics: %s", self._current.engine_id, cause_of_death(error))
            return None
        return stats

    async def _release_ended(self) -> NoReturn:
        while True:
            sessions = [await self._ended.get()]
            while not self._ended.empty():
                sessions.append(self._ended.get_nowait())
            if not self._is_loaded.is_set():  # its sessions are gone
                continue
            current = self._current
            try:
                await current.engine.release.remote(sessions)
            except (RayError, WorkerLost) as error:  # the sessions learned of its death over their links first
                self._meter.observe_moved(len(sessions))
                cause = cause_of_death(error)
                logger.warning("%s cannot free %d sessions, which move: %s", current.engine_id, len(sessions), cause)

    async def _record_metrics(self) -> NoReturn:
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            if (stats := await self._stats()) is not None:
                self._meter.observe(stats)
            try:
                await self._adapters.drop_unlisted(self._current)
            except Exception:
                logger.exception("unloaded adapters of %s were not dropped", self._current.engine_id)
            if self._is_loaded.is_set() and self._checkpoint.has_moved:
                self._current.fail(NEW_CHECKPOINT)

    async def _replace_dead(self) -> None:
        """Replace an engine as soon as it has died; end this process if no other can be loaded."""
        try:
            while await self._is_replaced(await self._current.end()):
                pass
        except Exception:
            logger.exception("%r cannot be replaced", self._current)
        logger.error(
            "replica %s ends, because no engine could be loaded; Serve starts another replica", self._replica_id
        )
        ray.kill(ray.get_runtime_context().current_actor)

    async def _is_replaced(self, cause: str) -> bool:
        """Load another engine; returns whether one serves now."""
        self._is_loaded.clear()
        self._meter.observe_moved(self._num_leases)
        if cause == NEW_CHECKPOINT:
            self._meter.observe_end()
            level, ended = logging.INFO, "%s of replica %s ends (%s); %d sessions on it move"
        else:
            self._meter.observe_death()
            level, ended = logging.ERROR, "%s of replica %s has died (%s); %d sessions on it move"
        logger.log(level, ended, self._current.engine_id, self._replica_id, cause, self._num_leases)
        began_s = time.monotonic()
        for _ in range(MAX_LOADS):
            if await self._has_loaded_another():
                logger.info("%s serves after %.1f s", self._current.engine_id, time.monotonic() - began_s)
                self._is_loaded.set()
                return True
        return False

    async def _has_loaded_another(self) -> bool:
        self._current.kill()
        engine = self._checkpoint.settings(await self._current.config_of_next())
        is_same = self._checkpoint.is_served(engine)
        self._findings = (self._current.findings or self._findings) if is_same else None
        self._current = self._begin_life(engine)
        try:
            self._info = await self._current.load(self._findings)
        except (OutriderError, RayError) as error:
            logger.error("%s has not loaded: %s", self._current.engine_id, cause_of_death(error))  # noqa: TRY400
            self._checkpoint.has_failed(engine)
            return False
        self._checkpoint.has_loaded(engine)
        return True


class TargetWorker(EngineWorker):
    role = "target"

    async def __init__(  # type: ignore[misc]  # as in EngineWorker
        self, config: WorkerConfig, model_name: str, actor: type[EngineActor[Any, Any]] = TargetActor
    ) -> None:
        await super().__init__(config, model_name, actor)

    async def record_routing_stats(self) -> dict[str, float]:
        """For `deploy.serve.routing`; Serve calls this every STATS_PERIOD_S."""
        stats = await self._stats()
        return self._measure(stats) if stats is not None else {KV_USE: 1.0}

    def _measure(self, stats: EngineStats) -> dict[str, float]:
        return {KV_USE: stats.kv_use}


class DraftWorker(EngineWorker):
    role = "draft"

    async def __init__(  # type: ignore[misc]  # as in EngineWorker
        self, config: WorkerConfig, model_name: str, q_top_tokens: int, actor: type[EngineActor[Any, Any]] = DraftActor
    ) -> None:
        self._waited_s = self._round_s = 0.0
        self._reported_s, self._reported_step_time_s = time.monotonic(), 0.0
        await super().__init__(config, model_name, actor, q_top_tokens)

    async def report_wait(self, waited_s: float, round_s: float) -> None:
        """Add an orchestrator's report: seconds that its sessions waited for drafts, and seconds of their rounds."""
        self._waited_s += waited_s
        self._round_s += round_s

    def _measure(self, stats: EngineStats) -> dict[str, float]:
        """The signals since the last report."""
        now_s = time.monotonic()
        computed_s = max(0.0, stats.step_time_s - self._reported_step_time_s)  # a new engine starts from 0
        elapsed_s = max(1e-9, now_s - self._reported_s)
        self._reported_s, self._reported_step_time_s = now_s, stats.step_time_s
        waited_s, round_s, self._waited_s, self._round_s = self._waited_s, self._round_s, 0.0, 0.0
        return {BUSY: min(1.0, computed_s / elapsed_s), WAITED_S: waited_s, ROUND_S: round_s}
