"""Ports to engines, and leases on them: requests go over an engine's link, or by actor calls where there is none.

Knows grants, engine actors and links; knows neither which replica grants a lease nor the states of sessions.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from core.errors import WorkerLost, WorkerStopping
from core.records import (
    Continuation,
    DraftDone,
    DraftReply,
    DraftRequest,
    DraftUpdate,
    Missing,
    Refused,
    TargetRequest,
    Verdict,
    VerifyReply,
)
from deploy.engines import cause_of_death
from deploy.link.client import Link
from deploy.link.stream import FrameTooLong
from deploy.serve.deployments import LeaseGrant

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ASKED_AFTER = 0.1
"""Share of the timeout after which an engine that has not answered an actor call is asked whether it works."""


def in_no_request(call: Callable[..., Result], *arguments: Any) -> Result:
    """Make a Ray call that belongs to no client's request.

    Ray and Serve keep the current request in context variables, and cancel every call made under it together with it. A
    batch for many sessions would then be cancelled with one of them.
    """
    return contextvars.Context().run(call, *arguments)


class EnginePort:
    """One engine, shared by all leases on it: requests go over its link, if there is one, else by actor calls."""

    def __init__(self, grant: LeaseGrant, timeout_s: float, engine_id: str) -> None:
        """`engine_id` differs from that of an earlier port to the same engine."""
        self.engine_id = engine_id
        self._replica_id = grant.replica_id
        self._engine = grant.engine
        self._timeout_s = timeout_s
        self._is_lost = False
        self._is_stopping = False
        self._link: Link | None = None
        self._leases: WeakSet[ServeLease[Any]] = WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine_id}{', lost' if self._is_lost else ''})"

    @property
    def has_broken_link(self) -> bool:
        """Whether sessions here have to move; the engine itself may be well, and grant another lease."""
        return self._link is not None and self._link.is_closed

    def use(self, link: Link) -> None:
        """Send requests over this link from now on."""
        self._link = link

    def mark_lost(self) -> None:
        """Note that the engine has died; logged once for all its sessions."""
        if self._is_lost:
            return
        self._is_lost = True
        logger.warning("%s has died; %d sessions move to another engine", self.engine_id, len(self._leases))
        if self._link is not None:
            self._link.close(f"{self.engine_id} is gone")

    def add(self, lease: ServeLease[Any]) -> None:
        """Add a lease on this engine."""
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

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored. Raises: WorkerLost."""
        with self._calling():
            await asyncio.wait_for(in_no_request(self._engine.release.remote, list(sessions)), self._timeout_s)

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

    async def _while_working(self, method: Any, batch: Sequence[Any]) -> Any:
        """Make an actor call that lasts as long as the engine works; silent is one that does not say so either.

        Raises: TimeoutError, RayError, WorkerLost.
        """
        call = asyncio.ensure_future(in_no_request(method.remote, batch))
        try:
            while not (await asyncio.wait({call}, timeout=ASKED_AFTER * self._timeout_s))[0]:
                await self._hear(call)
            return call.result()
        finally:
            call.cancel()

    async def _hear(self, call: asyncio.Future[Any]) -> None:
        """Return when the engine has made a step, or the call has ended. Raises: TimeoutError, RayError, WorkerLost."""
        works = asyncio.ensure_future(in_no_request(self._engine.works.remote))
        try:
            rest_s = (1 - ASKED_AFTER) * self._timeout_s
            ended, _ = await asyncio.wait({call, works}, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                raise TimeoutError
            if works in ended:
                works.result()
        finally:
            works.cancel()

    async def _answers(self, method: Any, batch: Sequence[Any], take: Callable[[Any], None] | None) -> Any:
        with self._calling():
            if self._link is not None:
                try:
                    return await self._link.exchange(batch, take, self._timeout_s)
                except FrameTooLong as error:
                    logger.warning("%d requests to %s go by an actor call: %s", len(batch), self.engine_id, error)
            return await self._while_working(method, list(batch))

    async def _exchange(
        self, method: Any, batch: Sequence[Any], kinds: tuple[type, ...], take: Callable[[Any], None] | None = None
    ) -> Any:
        """The replies of an actor call come together, those over a link one by one."""

        def take_of_kind(reply: Any) -> None:
            if not isinstance(reply, kinds):
                raise self._wrong(batch)
            if take is not None:
                take(reply)

        replies = await self._answers(method, batch, take_of_kind)
        is_list = isinstance(replies, list) and len(replies) == len(batch)
        if not is_list or not all(isinstance(reply, kinds) for reply in replies):
            raise self._wrong(batch)
        return replies

    def _wrong(self, batch: Sequence[Any]) -> WorkerLost:
        return WorkerLost(f"{self.engine_id} did not give one reply for each of {len(batch)} requests")


class TargetEnginePort(EnginePort):
    """A target engine actor as the orchestrator sees it."""

    async def verify(
        self, batch: Sequence[TargetRequest], take: Callable[[VerifyReply], None] | None = None
    ) -> Sequence[VerifyReply]:
        """As `core.ports.TargetPort`. Raises: WorkerLost."""
        if self._link is None and len(batch) > 1 and isinstance(batch[0], Continuation):
            return await self._offer(batch, take)
        kinds = (Verdict, Missing, Refused)
        replies: list[VerifyReply] = await self._exchange(self._engine.verify, batch, kinds, take)
        return replies

    async def _offer(
        self, offers: Sequence[TargetRequest], take: Callable[[VerifyReply], None] | None
    ) -> Sequence[VerifyReply]:
        """Offers are answered after different passes, and so each is an actor call of its own."""

        async def answer(offer: TargetRequest) -> VerifyReply:
            (reply,) = await self.verify([offer])
            if take is not None:
                take(reply)
            return reply

        calls = [asyncio.ensure_future(answer(offer)) for offer in offers]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()


class DraftEnginePort(EnginePort):
    """A draft engine actor as the orchestrator sees it."""

    def _move(self) -> None:
        """As `EnginePort._move`, and end all leases: a session that rests may send no message for a long time."""
        super()._move()
        for lease in list(self._leases):
            lease.release()

    async def draft(self, batch: Sequence[DraftRequest]) -> Sequence[DraftReply]:
        """One reply for each request, in order. Raises: WorkerLost."""
        kinds = (DraftDone, Missing, Refused)
        replies: list[DraftReply] = await self._exchange(self._engine.draft, batch, kinds)
        return replies

    async def grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> DraftReply:
        """As `core.ports.DraftPort`. Raises: WorkerLost."""
        with self._calling():
            reply = await self._end_of_growth(request, take)
        if not isinstance(reply, Missing | Refused):
            raise WorkerLost(f"{self.engine_id} ended growth without a reply")
        return reply

    async def _end_of_growth(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> Any:
        if self._link is not None:
            try:
                return await self._link.grow(request, take)
            except FrameTooLong as error:
                logger.warning("a request to %s goes by an actor call: %s", self.engine_id, error)
        return await self._grow(request, take)

    async def _grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> Any:
        """Grow by a streaming actor call."""
        async for result in in_no_request(self._engine.grow.remote, request):
            said = await result
            if not isinstance(said, DraftUpdate):
                return said
            take(said)
        return None


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
