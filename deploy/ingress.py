"""The replica that clients' calls reach: an orchestrator and its RPCs, put together over Serve.

Knows the handles of the two deployments; `deploy.app` makes a deployment of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from ray.serve.handle import DeploymentHandle

from core.config import ServiceConfig
from core.errors import Unavailable
from core.ports import Clock
from core.records import ModelInfo
from deploy.meters import Meters
from deploy.metrics import ServeRecorder
from deploy.ports import ServeLeases
from deploy.servicer import Served, Servicer
from deploy.translate import sampling_defaults
from orchestrator.service import Service
from orchestrator.text import Tokenizer

logger = logging.getLogger(__name__)

DESCRIBE_RETRY_S = 0.5
DRAFT_GRACE_S = 60.0
"""How long requests wait for a draft that is still loading; after that they are served without, until it is there."""
CONTROL_PERIOD_S = 1.0
"""How often the metrics of control are brought up to date; Ray passes them on every ten seconds or so."""


class MonotonicClock:
    """Real time; implements core.ports.Clock."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class Ingress(Servicer):
    """One orchestrator. It takes requests once the target is loaded: until then Serve sends it none.

    Raises: CheckpointError when the target's directory has no usable tokenizer or generation_config.
    """

    # Serve awaits a constructor that is a coroutine, and routes nothing to the replica before.
    async def __init__(  # type: ignore[misc]  # mypy knows only constructors that return None
        self, config: ServiceConfig, target: DeploymentHandle, draft: DeploymentHandle | None = None
    ) -> None:
        model_dir = config.target.engine.model
        tokenizer = Tokenizer.from_directory(model_dir)
        defaults = sampling_defaults(model_dir)
        leases = ServeLeases(target, draft, config.limits)
        target_info = await _described(leases.describe_target)
        clock = MonotonicClock()
        self._service = Service(config, target_info, None, tokenizer, leases, clock)
        meters = Meters(ServeRecorder(config.model_name), clock.now)
        super().__init__(self._service, Served(target_info, None, tokenizer, defaults, config), clock, meters)
        self._control_watch = asyncio.create_task(self._watch_control(clock))
        if draft is not None:
            self._introduction = asyncio.create_task(self._introduce_draft(leases))
            await asyncio.wait([self._introduction], timeout=DRAFT_GRACE_S)

    async def _introduce_draft(self, leases: ServeLeases) -> None:
        """The draft is optional at every moment, the first included."""
        info = await _described(leases.describe_draft)
        self._service.use_draft(info)
        self.show_draft(info)

    async def _watch_control(self, clock: Clock) -> NoReturn:
        while True:
            await clock.sleep(CONTROL_PERIOD_S)
            try:
                self._meters.saw_control(self._service.report())
            except Exception:
                logger.exception("the metrics of control are not up to date")


async def _described(describe: Callable[[], Awaitable[ModelInfo]]) -> ModelInfo:
    """The model, however long it takes to load."""
    while True:
        try:
            return await describe()
        except Unavailable as error:
            logger.info("waiting for a model: %s", error)
            await asyncio.sleep(DESCRIBE_RETRY_S)
