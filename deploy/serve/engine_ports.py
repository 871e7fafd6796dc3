"""Ports to engines, and leases on them: requests go over an engine's link.

Knows grants, engine actors and links; knows neither which replica grants a lease nor the states of sessions.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakSet

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from core.errors import WorkerLost, WorkerStopping
from core.records import DraftUpdate, Missing, Refused, Verdict
from deploy.engines import cause_of_death
from deploy.link.client import Link
from deploy.serve.deployments import LeaseGrant

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def outside_request_context(call: Callable[..., Result], *arguments: Any) -> Result:
    """Make a Ray call that belongs to no client's request.

    Ray and Serve keep the current request in context variables, and cancel every call made under it together with it. A
    batch for many sessions would then be cancelled with one of them.
    """
    return contextvars.Context().run(call, *arguments)


class EnginePort:
    """One engine, shared by all leases on it. Implements `core.ports.EnginePort` over the engine's link."""

    _kinds: ClassVar[tuple[type, ...]]
    """Types of replies."""

    def __init__(self, grant: LeaseGrant, link: Link, timeout_s: float, engine_id: str) -> None:
        """`engine_id` differs from that of an earlier port to the same engine."""
        self.engine_id = engine_id
        self._replica_id = grant.replica_id
        self._engine = grant.engine
        self._timeout_s = timeout_s
        self._is_lost = False
        self._is_stopping = False
        self._link = link
        self._leases: WeakSet[ServeLease[Any]] = WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine_id}{', lost' if self._is_lost else ''})"

    @property
    def has_broken_link(self) -> bool:
        """Whether sessions here have to move; the engine itself may be well, and grant another lease."""
        return self._link.is_closed

    def mark_lost(self) -> None:
        """Note that the engine has died; logged once for all its sessions."""
        if self._is_lost:
            return
        self._is_lost = True
        logger.warning("%s has died; %d sessions move to another engine", self.engine_id, len(self._leases))
        self._link.close(f"{self.engine_id} is gone")

    def add(self, lease: ServeLease[Any]) -> None:
        self._leases.add(lease)

    def leave(self, stopping: Set[str], grace_s: float) -> None:
        """If the engine's replica is about to stop, count as lost after the grace period, so that sessions move."""
        if not self._is_stopping and self._replica_id in stopping:
            self._is_stopping = True
            logger.info("%s is about to stop; its sessions have %g s to end there", self.engine_id, grace_s)
            asyncio.get_running_loop().call_later(grace_s, self._move)

    def _move(self) -> None:
        """Refuse all calls from now on, as if the engine had died."""
        self._is_lost = True

    async def exchange(self, batch: Sequence[Any], take: Callable[[Any], None]) -> None:
        """Send requests and pass each reply to `take`; see `core.ports.EnginePort`. Raises: WorkerLost."""

        def take_of_kind(reply: Any) -> None:
            if not isinstance(reply, self._kinds):
                raise WorkerLost(f"it answered with a {type(reply).__name__}")
            take(reply)

        with self._calling():
            await self._link.exchange(batch, take_of_kind, self._timeout_s)

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored. Raises: WorkerLost."""
        with self._calling():
            await asyncio.wait_for(
                outside_request_context(self._engine.release.remote, list(sessions)), self._timeout_s
            )

    def _check(self) -> None:
        """Raises: WorkerLost when the engine is lost."""
        if self._is_lost and self._is_stopping:
            raise WorkerStopping(f"{self.engine_id} is about to stop")
        if self._is_lost:
            raise WorkerLost(f"{self.engine_id} is gone")

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a call to the engine: whatever goes wrong means that the engine is lost. Raises: WorkerLost."""
        self._check()
        try:
            yield
        except TimeoutError as error:
            raise WorkerLost(f"{self.engine_id} has not answered for {self._timeout_s:g} s") from error
        except (RayError, WorkerLost) as error:
            raise WorkerLost(f"{self.engine_id} failed: {cause_of_death(error)}") from error


class TargetEnginePort(EnginePort):
    _kinds = (Verdict, Missing, Refused)


class DraftEnginePort(EnginePort):
    _kinds = (DraftUpdate, Missing, Refused)

    def _move(self) -> None:
        """Like `EnginePort._move`; also ends all leases: a session that rests may send no message for a long time."""
        super()._move()
        for lease in list(self._leases):
            lease.release()


Port = TypeVar("Port", bound=EnginePort)


class ServeLease(Generic[Port]):
    """A streaming Serve call that stays open after its grant; when the replica ends it, the engine is lost."""

    def __init__(self, name: str, grant: LeaseGrant, port: Port, stream: Any) -> None:
        self.name = name
        self.engine_id = port.engine_id
        self.epoch = grant.epoch
        self.port = port
        self._stream = stream
        self._watch = asyncio.create_task(self._watch_stream(), context=contextvars.Context())
        port.add(self)

    def __repr__(self) -> str:
        return f"ServeLease({self.engine_id}{', ended' if self._watch.done() else ''})"

    def release(self) -> None:
        """End the lease; returns at once, may be called twice, and survives the caller's cancellation."""
        if not self._watch.done():
            self._stream.cancel()

    async def _watch_stream(self) -> None:
        # The first three are also raised when the replica dies.
        with suppress(RayError, RayServeException, grpc.RpcError, asyncio.CancelledError):
            async for _ in self._stream:
                pass
        if not self._stream.cancelled():
            self.port.mark_lost()
