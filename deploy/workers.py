"""The control plane: Serve deployments of target and draft, whose replicas own one engine each and grant leases on it.

Knows the life cycle of Serve's replicas, and the engine actors; the requests of sessions never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.block_hash import BlockHash
from core.config import WorkerConfig
from core.errors import OutriderError, WorkerLost
from core.records import ModelInfo
from deploy import engines
from deploy.engines import DraftActor, EngineActor, FollowerActor, TargetActor
from deploy.link.address import LinkAddress
from deploy.meters import EngineMeter
from deploy.metrics import ENGINE_CATALOGUE, ServeRecorder
from deploy.scaling import BUSY, KV_USE, ROUND_S, WAITED_S

if TYPE_CHECKING:
    from workers.engine_stats import EngineStats

logger = logging.getLogger(__name__)

REPLICA_CPUS = 0.1
"""Ray's logical CPUs for the replica itself, which does little but wait."""
ENGINE_BUNDLE = 1
HEALTH_TIMEOUT_S = 15.0
"""Longer than any step of an engine; Serve replaces a replica whose engine has missed this three times."""
METRICS_PERIOD_S = 5.0
"""Ray passes metrics on every ten seconds."""
FAREWELL_S = 0.3
"""How long the open leases of a dying replica have to tell their holders."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The first message of a lease: where the session's requests go."""

    engine_id: str
    epoch: int
    engine: Any
    """Handle of the engine actor."""
    replica_id: str
    """As Serve names the replica that owns the engine."""
    link: LinkAddress | None = None
    """Where the engine is reached without Ray; None where it is not."""


@dataclass(frozen=True, slots=True)
class _Report:
    """When a replica last said how busy it is, and how long its engine had computed by then."""

    now_s: float
    step_time_s: float


def bundles(config: WorkerConfig) -> list[dict[str, float]]:
    """What a replica reserves: first for itself, then for each rank of its engine."""
    rank = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
    rank = {name: amount for name, amount in rank.items() if amount > 0}
    return [{"CPU": REPLICA_CPUS}, *[dict(rank) for _ in range(config.engine.tensor_parallel)]]


class EngineWorker(ABC):
    """A replica that owns one engine, of one rank or more. When it dies the replica follows, and Serve starts anew.

    Invariant: whatever ends a lease, the engine is told to free its session.
    """

    role: ClassVar[str]

    def __init__(
        self, config: WorkerConfig, model_name: str, actor: type[EngineActor[Any, Any]], *arguments: Any
    ) -> None:
        """`model_name` is what the engine's metrics are labelled with: what requests call the model."""
        self._model_name = model_name
        self._epoch = secrets.randbits(62)
        self._engine_id = f"{self.role}-{self._epoch:016x}"
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine = engines.start(actor, config.engine, self._epoch, *arguments, **_placement(config, 0))
        self._followers = [
            engines.start(FollowerActor, config.engine, index, **_placement(config, index))
            for index in range(1, config.engine.tensor_parallel)
        ]
        self._info = _load(self._engine, self._followers)
        self._link: LinkAddress | None = ray.get(self._engine.open_links.remote())
        self._ended: asyncio.Queue[str] = asyncio.Queue()
        self._dying = asyncio.Event()
        # These live as long as the replica: Ray cancels what is called from a cancelled lease.
        lives = (self._release_ended(), self._die_with_engine(), self._record_metrics())
        self._tasks = [asyncio.create_task(life) for life in lives]

    async def lease(self, session: str, prefix: tuple[BlockHash, ...] = ()) -> AsyncIterator[LeaseGrant]:  # noqa: ARG002
        """One grant, and then nothing until the holder lets go; `session` names this lease alone.

        `prefix` is for the router, which reads it on the way (`deploy.routing`).

        How many there are at once is Serve's to bound: who comes later waits in the router, not here.
        Raises: WorkerLost when the engine dies.
        """
        try:
            if not self._dying.is_set():
                yield LeaseGrant(self._engine_id, self._epoch, self._engine, self._replica_id, self._link)
            await self._dying.wait()
            raise WorkerLost(f"{self._engine_id} is gone")
        finally:
            self._ended.put_nowait(session)

    async def describe(self) -> ModelInfo:
        return self._info

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this every few seconds, where the deployment scales. Raises: what the engine failed with."""
        return self._measure(await self._engine.stats.remote())

    @abstractmethod
    def _measure(self, stats: EngineStats) -> dict[str, float]:
        """What `deploy.scaling` goes by."""

    async def check_health(self) -> None:
        """Serve calls this. Raises: an error when the engine does not answer in time."""
        try:
            await asyncio.wait_for(self._engine.ready.remote(), HEALTH_TIMEOUT_S)
        except WorkerLost:
            self._dying.set()
            raise

    async def _release_ended(self) -> NoReturn:
        while True:
            sessions = [await self._ended.get()]
            while not self._ended.empty():
                sessions.append(self._ended.get_nowait())
            try:
                await self._engine.release.remote(sessions)
            except (RayError, WorkerLost) as error:
                logger.warning("%s did not free %d sessions: %s", self._engine_id, len(sessions), error)

    async def _record_metrics(self) -> NoReturn:
        meter = EngineMeter(ServeRecorder(self._model_name, ENGINE_CATALOGUE))
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            try:
                meter.saw(await self._engine.stats.remote())
            except (RayError, WorkerLost) as error:  # whose end is seen to elsewhere
                logger.warning("%s says nothing of itself: %s", self._engine_id, error)

    async def _die_with_engine(self) -> None:
        """End the leases, then this process, as soon as the engine has died or is known to have failed."""
        watch = asyncio.create_task(_until_death(self._engine))
        watch.add_done_callback(lambda _: self._dying.set())
        await self._dying.wait()
        logger.error("%s is gone; so is this replica", self._engine_id)
        await asyncio.sleep(FAREWELL_S)
        ray.kill(ray.get_runtime_context().current_actor)


class TargetWorker(EngineWorker):
    """A replica of the target."""

    role = "target"

    def __init__(self, config: WorkerConfig, model_name: str, actor: type[EngineActor[Any, Any]] = TargetActor) -> None:
        super().__init__(config, model_name, actor)

    async def record_routing_stats(self) -> dict[str, float]:
        """For `deploy.routing`; Serve calls this every STATS_PERIOD_S. Raises: what the engine failed with."""
        return self._measure(await self._engine.stats.remote())

    def _measure(self, stats: EngineStats) -> dict[str, float]:
        return {KV_USE: 1.0 - stats.num_free_blocks / max(1, stats.num_blocks)}


class DraftWorker(EngineWorker):
    """A replica of the draft."""

    role = "draft"

    def __init__(
        self,
        config: WorkerConfig,
        model_name: str,
        q_top_tokens: int,
        actor: type[EngineActor[Any, Any]] = DraftActor,
    ) -> None:
        super().__init__(config, model_name, actor, q_top_tokens)
        self._waited_s = self._round_s = 0.0
        self._reported = _Report(time.monotonic(), 0.0)

    async def report_wait(self, waited_s: float, round_s: float) -> None:
        """An orchestrator's sessions waited for drafts, whichever replica's, so long in rounds that took so long."""
        self._waited_s += waited_s
        self._round_s += round_s

    def _measure(self, stats: EngineStats) -> dict[str, float]:
        """Since the last time."""
        before, self._reported = self._reported, _Report(time.monotonic(), stats.step_time_s)
        computed_s = self._reported.step_time_s - before.step_time_s
        elapsed_s = max(1e-9, self._reported.now_s - before.now_s)
        waited_s, round_s, self._waited_s, self._round_s = self._waited_s, self._round_s, 0.0, 0.0
        return {BUSY: min(1.0, computed_s / elapsed_s), WAITED_S: waited_s, ROUND_S: round_s}


def _placement(config: WorkerConfig, rank: int) -> dict[str, Any]:
    """Ray options that put a rank into its bundle of this replica's own placement group."""
    return {
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "resources": config.resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            get_current_placement_group(), placement_group_bundle_index=ENGINE_BUNDLE + rank
        ),
    }


def _load(engine: Any, followers: Sequence[Any]) -> ModelInfo:
    """What the engine loaded. Raises: the engine's own error, without the trace of the way it came.

    What goes wrong on a follower before the ranks have agreed on what they loaded, its engine raises, too.
    """
    meeting = ray.get(engine.meeting.remote()) if followers else None
    for index, follower in enumerate(followers, 1):
        follower.follow.remote(meeting).future().add_done_callback(partial(_log_end, index))
    try:
        info: ModelInfo = ray.get(engine.load.remote(meeting))
    except RayTaskError as error:
        if isinstance(error.cause, OutriderError):
            raise error.cause from None
        raise
    return info


def _log_end(rank: int, end: Future[None]) -> None:
    """Of a follower: why, if it had a reason of its own."""
    if (error := end.exception()) is not None:
        logger.warning("rank %d has ended: %s", rank, str(error).strip().splitlines()[-1])


async def _until_death(engine: Any) -> None:
    try:
        await engine.until_death.remote()
    except RayError as error:
        logger.info("the engine has died: %s", error)
