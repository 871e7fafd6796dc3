"""The engines of a deployment on which this orchestrator has had leases, and how full they are.

Engines are asked on demand, at most every half second: the endpoint pickers of a gateway ask all the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from core.errors import WorkerLost
from deploy.serve.engine_ports import outside_request_context

if TYPE_CHECKING:
    from core.records import EngineStats

PERIOD_S = 0.5
WAIT_S = 0.2
"""Seconds to wait for answers, which engines send between two passes. Then their last answers are used."""
ASK_TIMEOUT_S = 5.0


class KnownEngines:
    """Engines by replica. The next lease on a replica replaces the handle of an engine that died."""

    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}
        self._stats: dict[str, EngineStats] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")

    def add(self, replica_id: str, engine: Any) -> None:
        self._engines[replica_id] = engine

    def drop(self, replica_ids: Set[str]) -> None:
        """Forget replicas that are about to stop: they take no new sessions."""
        for replica_id in replica_ids:
            self._engines.pop(replica_id, None)
            self._stats.pop(replica_id, None)

    async def stats(self) -> list[EngineStats]:
        """Statistics of all engines that have answered: at most `PERIOD_S` old, except for engines in a long pass."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked_s >= PERIOD_S):
            self._asked_s = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait({self._asking}, timeout=WAIT_S)
        return list(self._stats.values())

    async def _ask(self) -> None:
        await asyncio.gather(*(self._ask_one(*each) for each in list(self._engines.items())))

    async def _ask_one(self, replica_id: str, engine: Any) -> None:
        try:
            stats = await asyncio.wait_for(outside_request_context(engine.stats.remote), ASK_TIMEOUT_S)
        except (TimeoutError, RayError, WorkerLost) as error:
            if not isinstance(error, TimeoutError) and self._engines.get(replica_id) is engine:
                self.drop({replica_id})
            return
        if self._engines.get(replica_id) is engine:
            self._stats[replica_id] = stats
