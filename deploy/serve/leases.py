"""Leases and ports over Ray: where the orchestrator's requests leave for the engines.

Knows Serve handles and engine actors; knows nothing of the states of sessions. All Ray calls of the orchestrator are
made here.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from core.config import Limits, LinkTls
from core.errors import Unavailable, WorkerLost, WorkerStopping
from core.records import (
    DraftReply,
    DraftRequest,
    DraftTree,
    DraftUpdate,
    Missing,
    ModelInfo,
    Refused,
    TargetRequest,
    Verdict,
    VerifyReply,
)
from core.text import BlockHash
from deploy.engines import cause_of_death
from deploy.link.address import LinkTroubles
from deploy.link.client import Link
from deploy.link.frames import FrameTooLong
from deploy.link.pool import Links
from deploy.link.tls import Certificates
from deploy.serve.affinity import beginnings
from deploy.serve.deployments import LeaseGrant, Refusal
from orchestrator.session import DraftWait

logger = logging.getLogger(__name__)

GRANT_RETRY_S = 0.2
"""Pause before another replica is asked for a place."""

REPORT_TIMEOUT_S = 5.0

Result = TypeVar("Result")


def _in_no_request(call: Callable[..., Result], *arguments: Any) -> Result:
    """Make a Ray call that belongs to no client's request.

    Ray and Serve keep the request that is being served in context variables, and cancel with it every call made under
    it: a batch that serves many sessions would die with one of them.
    """
    return contextvars.Context().run(call, *arguments)


class EnginePort:
    """One engine, shared by all leases on it: requests go over its link, if there is one, else by actor calls."""

    def __init__(self, grant: LeaseGrant, timeout_s: float, engine_id: str) -> None:
        """`engine_id` tells this port from an earlier one to the same engine."""
        self._engine_id = engine_id
        self._replica_id = grant.replica_id
        self._engine = grant.engine
        self._timeout_s = timeout_s
        self._is_lost = False
        self._is_stopping = False
        self._link: Link | None = None
        self._leases: WeakSet[ServeLease[Any]] = WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine_id}{', lost' if self._is_lost else ''})"

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def has_broken_link(self) -> bool:
        """Whether who holds a lease here has to move; the engine itself may be well, and grant another."""
        return self._link is not None and self._link.is_closed

    def use(self, link: Link) -> None:
        """From now on."""
        self._link = link

    def mark_lost(self) -> None:
        """The engine has died; said once, however many sessions find out."""
        if self._is_lost:
            return
        self._is_lost = True
        logger.warning("%s has died; %d sessions move to another engine", self._engine_id, len(self._leases))
        if self._link is not None:
            self._link.close(f"{self._engine_id} is gone")

    def add(self, lease: ServeLease[Any]) -> None:
        """Another lease on this engine."""
        self._leases.add(lease)

    def leave(self, stopping: Set[str], grace_s: float) -> None:
        """If the engine's replica is among those that are to stop, be lost after the grace: who is left then moves."""
        if not self._is_stopping and self._replica_id in stopping:
            self._is_stopping = True
            logger.info("%s is to stop; its sessions have %g s to end there", self._engine_id, grace_s)
            asyncio.get_running_loop().call_later(grace_s, self._move)

    def _move(self) -> None:
        """From now on every call is refused, as if the engine had died."""
        self._is_lost = True

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored. Raises: WorkerLost."""
        await self._call(self._engine.release, list(sessions))

    def _check(self) -> None:
        """Raises: WorkerLost when there is nobody to call."""
        if self._is_lost and self._is_stopping:
            raise WorkerStopping(f"{self._engine_id} is to stop")
        if self._is_lost:
            raise WorkerLost(f"{self._engine_id} is gone")

    async def _call(self, method: Any, argument: Sequence[Any]) -> Any:
        """By an actor call."""
        self._check()
        try:
            return await asyncio.wait_for(_in_no_request(method.remote, argument), self._timeout_s)
        except TimeoutError as error:
            raise WorkerLost(f"{self._engine_id} has not answered for {self._timeout_s:g} s") from error
        except (RayError, WorkerLost) as error:
            raise WorkerLost(f"{self._engine_id} failed: {cause_of_death(error)}") from error

    async def _send(self, link: Link, batch: Sequence[Any]) -> list[Any]:
        """Over the link. Raises: WorkerLost; FrameTooLong."""
        self._check()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await link.exchange(batch)
        except TimeoutError as error:
            raise WorkerLost(f"{self._engine_id} has not answered for {self._timeout_s:g} s") from error
        except WorkerLost as error:
            raise WorkerLost(f"{self._engine_id} failed: {error}") from error

    async def _answers(self, method: Any, batch: Sequence[Any]) -> Any:
        if self._link is not None:
            try:
                return await self._send(self._link, batch)
            except FrameTooLong as error:
                logger.warning("%d requests to %s go by an actor call: %s", len(batch), self._engine_id, error)
        return await self._call(method, list(batch))

    async def _exchange(self, method: Any, batch: Sequence[Any], kinds: tuple[type, ...]) -> Any:
        replies = await self._answers(method, batch)
        is_list = isinstance(replies, list) and len(replies) == len(batch)
        if not is_list or not all(isinstance(reply, kinds) for reply in replies):
            raise WorkerLost(f"{self._engine_id} did not answer {len(batch)} requests with as many replies")
        return replies


class TargetEnginePort(EnginePort):
    """A target engine actor as the orchestrator sees it."""

    async def verify(self, batch: Sequence[TargetRequest]) -> Sequence[VerifyReply]:
        """One reply for each request, in order. Raises: WorkerLost."""
        replies: list[VerifyReply] = await self._exchange(self._engine.verify, batch, (Verdict, Missing, Refused))
        return replies


class DraftEnginePort(EnginePort):
    """A draft engine actor as the orchestrator sees it."""

    def _move(self) -> None:
        """A session that rests calls for an hour or never: what it holds is given back for it."""
        super()._move()
        for lease in list(self._leases):
            lease.release()

    async def draft(self, batch: Sequence[DraftRequest]) -> Sequence[DraftReply]:
        """One reply for each request, in order. Raises: WorkerLost."""
        replies: list[DraftReply] = await self._exchange(self._engine.draft, batch, (DraftTree, Missing, Refused))
        return replies

    async def grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> DraftReply:
        """As core.ports.DraftPort says. Raises: WorkerLost."""
        self._check()
        try:
            reply = await self._end_of_growth(request, take)
        except (RayError, WorkerLost) as error:
            raise WorkerLost(f"{self._engine_id} failed: {cause_of_death(error)}") from error
        if not isinstance(reply, Missing | Refused):
            raise WorkerLost(f"{self._engine_id} ended growth with something else than a reply")
        return reply

    async def _end_of_growth(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> Any:
        if self._link is not None:
            try:
                return await self._link.grow(request, take)
            except FrameTooLong as error:
                logger.warning("a request to %s goes by an actor call: %s", self._engine_id, error)
        return await self._grow(request, take)

    async def _grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> Any:
        """By an actor call that stays open."""
        async for result in _in_no_request(self._engine.grow.remote, request):
            said = await result
            if not isinstance(said, DraftUpdate):
                return said
            take(said)
        return None


Port = TypeVar("Port", bound=EnginePort)


class ServeLease(Generic[Port]):
    """A streaming Serve call that has brought its grant and stays open; when it ends by itself, the engine is gone."""

    def __init__(self, name: str, grant: LeaseGrant, port: Port, stream: Any) -> None:
        self._name = name
        self._grant = grant
        self._port = port
        self._stream = stream
        self._watch = asyncio.create_task(self._watch_stream(), context=contextvars.Context())
        port.add(self)

    def __repr__(self) -> str:
        return f"ServeLease({self.engine_id}{', ended' if self._watch.done() else ''})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def engine_id(self) -> str:
        return self._port.engine_id

    @property
    def epoch(self) -> int:
        return self._grant.epoch

    @property
    def port(self) -> Port:
        return self._port

    def release(self) -> None:
        """Give the place back; returns at once, may be called twice, and survives the caller's cancellation."""
        if not self._watch.done():
            self._stream.cancel()

    async def _watch_stream(self) -> None:
        with suppress(RayError, RayServeException, asyncio.CancelledError):  # a replica's own death comes as an error
            async for _ in self._stream:
                pass
        if not self._stream.cancelled():
            self._port.mark_lost()


class _Deployment(Generic[Port]):
    """One deployment of engines: gives leases on whichever replica Serve picks."""

    def __init__(
        self, handle: DeploymentHandle, port: type[Port], limits: Limits, certificates: Certificates | None
    ) -> None:
        self._name = handle.deployment_name
        self._handle = handle
        self._lease = handle.options(stream=True).lease
        self._describe = handle.describe
        self._new_port = port
        self._limits = limits
        self._ports: WeakValueDictionary[str, Port] = WeakValueDictionary()
        self._num_replaced = 0
        self.links = Links(certificates)

    async def take(self, session: str, tokens: Sequence[int]) -> ServeLease[Port]:
        """A lease from the first replica that grants one. Raises: Unavailable."""
        prefix = beginnings(tokens)
        refused_by: set[str] = set()
        problem = ""
        try:
            async with asyncio.timeout(self._limits.lease_timeout_s):
                while True:
                    try:
                        answer = await self._ask(session, prefix, frozenset(refused_by))
                    except RayError as error:
                        problem = f": {cause_of_death(error)}"
                        await asyncio.sleep(GRANT_RETRY_S)
                        continue
                    if isinstance(answer, ServeLease):
                        return answer
                    refused_by.add(answer.replica_id)
                    problem = ": an engine is loading"
        except (TimeoutError, RayServeException) as error:
            waited = f"no {self._name} granted a place within {self._limits.lease_timeout_s:g} s"
            raise Unavailable(waited + problem) from error

    async def describe(self) -> ModelInfo:
        """Raises: Unavailable."""
        try:
            info: ModelInfo = await asyncio.wait_for(
                _in_no_request(self._describe.remote), self._limits.lease_timeout_s
            )
        except (TimeoutError, RayError, RayServeException) as error:
            raise Unavailable(f"no {self._name} answers: {cause_of_death(error)}") from error
        return info

    def leave(self, stopping: Set[str], grace_s: float) -> None:
        """Move off the engines of these replicas."""
        for port in list(self._ports.values()):
            port.leave(stopping, grace_s)

    async def report_wait(self, wait: DraftWait) -> None:
        """Raises: Unavailable."""
        report = _in_no_request(self._handle.report_wait.remote, wait.waited_s, wait.round_s)
        try:
            await asyncio.wait_for(report, REPORT_TIMEOUT_S)
        except (TimeoutError, RayError, RayServeException) as error:
            raise Unavailable(f"no {self._name} takes a report: {cause_of_death(error)}") from error

    async def _ask(
        self, session: str, prefix: tuple[BlockHash, ...], refused_by: frozenset[str]
    ) -> ServeLease[Port] | Refusal:
        name = f"{session}@{secrets.token_hex(4)}"
        stream = _in_no_request(self._lease.remote, name, prefix, refused_by)
        try:
            answer: LeaseGrant | Refusal = await anext(stream)
            if isinstance(answer, Refusal):
                return answer
            link = await self.links.to(answer.engine_id, answer.link)
        except BaseException:  # also when the caller is cancelled: a grant that is on its way must not stay
            stream.cancel()
            raise
        return ServeLease(name, answer, self._port(answer, link), stream)

    def _port(self, grant: LeaseGrant, link: Link | None) -> Port:
        port = self._ports.get(grant.engine_id)
        if port is None or port.has_broken_link:
            engine_id = grant.engine_id
            if port is not None:
                self._num_replaced += 1
                engine_id += f"/{self._num_replaced}"
            port = self._ports[grant.engine_id] = self._new_port(grant, self._limits.reply_timeout_s, engine_id)
        if link is not None:
            port.use(link)
        return port


class ServeLeases:
    """Takes leases through the handles of the two deployments; implements core.ports.Leases."""

    def __init__(
        self,
        target: DeploymentHandle,
        draft: DeploymentHandle | None,
        limits: Limits,
        *,
        target_tls: LinkTls | None = None,
        draft_tls: LinkTls | None = None,
    ) -> None:
        """`target_tls` and `draft_tls` are the `link_tls` of their engines. Raises: ConfigError when it is wrong."""
        self._target = _Deployment(target, TargetEnginePort, limits, Certificates.of(target_tls))
        self._draft = None
        if draft is not None:
            self._draft = _Deployment(draft, DraftEnginePort, limits, Certificates.of(draft_tls))
        self._limits = limits

    async def take_target(self, session: str, tokens: Sequence[int] = ()) -> ServeLease[TargetEnginePort]:
        """As core.ports.Leases says. Raises: Unavailable when no replica grants a place in time."""
        return await self._target.take(session, tokens)

    async def take_draft(self, session: str, tokens: Sequence[int] = ()) -> ServeLease[DraftEnginePort]:
        """Raises: Unavailable when there is no draft, or none grants a place in time."""
        if self._draft is None:
            raise Unavailable("this service has no draft")
        return await self._draft.take(session, tokens)

    @property
    def link_troubles(self) -> LinkTroubles:
        """Of the links to targets and drafts together."""
        troubles = self._target.links.troubles
        return troubles + self._draft.links.troubles if self._draft is not None else troubles

    def close_links(self) -> None:
        """Whoever waits for an engine is told that it is lost."""
        for side in (self._target, self._draft):
            if side is not None:
                side.links.close()

    def leave(self, stopping: Set[str]) -> None:
        """Move off the engines of replicas that are to stop: off drafts at once, off targets after the grace."""
        self._target.leave(stopping, self._limits.drain_grace_s)
        if self._draft is not None:
            self._draft.leave(stopping, 0.0)

    async def report_wait(self, wait: DraftWait) -> None:
        """Tell the draft's replicas how long sessions have waited for them, so that their number can follow.

        Any replica takes it in for all. Raises: Unavailable.
        """
        if self._draft is not None:
            await self._draft.report_wait(wait)

    async def describe_target(self) -> ModelInfo:
        """Raises: Unavailable."""
        return await self._target.describe()

    async def describe_draft(self) -> ModelInfo:
        """Raises: Unavailable."""
        if self._draft is None:
            raise Unavailable("this service has no draft")
        return await self._draft.describe()
