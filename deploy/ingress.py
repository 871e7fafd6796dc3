"""The replica that clients' calls reach: an orchestrator and its RPCs, put together over Serve.

Knows the handles of the two deployments; `deploy.app` makes a deployment of it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ray.serve.handle import DeploymentHandle

from core.config import ServiceConfig
from core.errors import Unavailable
from core.records import ModelInfo
from deploy.ports import ServeLeases
from deploy.servicer import Served, Servicer
from deploy.translate import sampling_defaults
from orchestrator.service import Service
from orchestrator.text import Tokenizer

logger = logging.getLogger(__name__)

DESCRIBE_RETRY_S = 0.5


class MonotonicClock:
    """Real time; implements core.ports.Clock."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class Ingress(Servicer):
    """One orchestrator. It takes requests once both models are loaded: until then Serve sends it none.

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
        target_info, draft_info = await _describe(leases)
        clock = MonotonicClock()
        service = Service(config, target_info, draft_info, tokenizer, leases, clock)
        super().__init__(service, Served(target_info, draft_info, tokenizer, defaults, config), clock)


async def _describe(leases: ServeLeases) -> tuple[ModelInfo, ModelInfo | None]:
    """The models, however long they take to load."""
    while True:
        try:
            return await leases.describe()
        except Unavailable as error:
            logger.info("waiting for the models: %s", error)
            await asyncio.sleep(DESCRIBE_RETRY_S)
