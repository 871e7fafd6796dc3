"""One orchestrator's leases on one kind of engine, with a batcher for each leased engine.

Target and draft differ only in their messages, so one class serves both. Every failure of an engine becomes WorkerLost
or Unavailable here, so that no session waits for an answer that will not come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from core.errors import OutriderError, Unavailable, WorkerLost
from core.ports import EnginePort, Lease
from core.records import DraftReply, DraftRequest, TargetRequest, VerifyReply
from orchestrator.dispatch.batcher import Batcher

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=TargetRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class EnginePool(Generic[Request, Reply]):
    """The engines of one kind, shared by the sessions of one orchestrator.

    Invariant: an engine has a batcher only while a session holds a lease on it.
    """

    def __init__(
        self,
        take: Callable[..., Awaitable[Lease[EnginePort[Request, Reply]]]],
        deliver: Callable[[Request, Reply | WorkerLost], None],
        max_calls: int | None = None,
        is_joint: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        """`max_calls`, `is_joint`: see `Batcher`."""
        self._take = take
        self._deliver = deliver
        self._max_calls = max_calls
        self._is_joint = is_joint
        self._batchers: dict[str, Batcher[Request, Reply]] = {}
        """Batchers by engine id."""
        self._num_leases: Counter[str] = Counter()
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def num_engines(self) -> int:
        return len(self._batchers)

    async def take(self, session_id: str, *what: Any) -> Lease[EnginePort[Request, Reply]]:
        """Take a lease for this session; `what` as in `core.ports.Leases`. `give_back` ends it. Raises: Unavailable."""
        try:
            lease = await self._take(session_id, *what)
        except OutriderError as error:
            raise Unavailable(str(error)) from error
        except Exception as error:
            logger.exception("no lease could be taken for %s", session_id)
            raise Unavailable("no engine could be reached; try again") from error
        self._num_leases[lease.engine_id] += 1
        return lease

    def calls_to(self, lease: Lease[EnginePort[Request, Reply]]) -> Batcher[Request, Reply]:
        """Return the batcher of the leased engine. Replies go to the pool's `deliver`."""
        key = lease.engine_id
        batcher = self._batchers.get(key)
        if batcher is None:
            batcher = self._batchers[key] = Batcher(lease.port.exchange, self._deliver, self._max_calls, self._is_joint)
        return batcher

    def give_back(self, lease: Lease[EnginePort[Request, Reply]]) -> None:
        """End the lease, and free the session's memory on the engine at once, because the lease's end arrives later.

        This runs in a task that no caller can cancel: Ray cancels the calls of a cancelled coroutine.
        """
        lease.release()
        self._num_leases[lease.engine_id] -= 1
        if self._num_leases[lease.engine_id] == 0:
            del self._num_leases[lease.engine_id]
            self._batchers.pop(lease.engine_id, None)  # a call in flight ends by itself
        task = asyncio.ensure_future(self._free(lease))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def drain(self) -> None:
        """Wait until the ended leases are released."""
        while self._releasing:
            await asyncio.wait(self._releasing)

    @staticmethod
    async def _free(lease: Lease[EnginePort[Request, Reply]]) -> None:
        try:
            await lease.port.release([lease.name])
        except WorkerLost:
            logger.debug("%s: the engine is gone, and what was held there with it", lease.name)
