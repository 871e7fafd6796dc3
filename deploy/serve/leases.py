"""Leases on engines over Ray Serve, and reports to the deployments of engines.

Knows Serve handles; knows nothing of the states of sessions. All Ray calls of the orchestrator are made here, in
`engine_ports` and in `known_engines`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence, Set
from typing import Generic
from weakref import WeakValueDictionary

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from core.config import Limits, LinkTls
from core.errors import StartupError, Unavailable
from core.records import Adapter, EngineStats, ModelInfo, root_of
from core.text import BlockHash
from deploy.engines import cause_of_death
from deploy.link.address import LinkTroubles
from deploy.link.client import Link
from deploy.link.pool import Links
from deploy.link.stream import LinkError
from deploy.link.tls import Certificates
from deploy.serve.affinity import prefix_hashes
from deploy.serve.deployments import LeaseGrant, Refusal
from deploy.serve.engine_ports import DraftEnginePort, Port, ServeLease, TargetEnginePort, outside_request_context
from deploy.serve.known_engines import KnownEngines
from orchestrator.session import DraftWait

logger = logging.getLogger(__name__)

GRANT_RETRY_S = 0.2
"""Seconds before the next attempt to take a lease."""

REPORT_TIMEOUT_S = 5.0


class _Deployment(Generic[Port]):
    """One deployment of engines: takes leases on the replicas that Serve picks."""

    def __init__(
        self, handle: DeploymentHandle, port: type[Port], limits: Limits, certificates: Certificates | None
    ) -> None:
        self._name = handle.deployment_name
        self._handle = handle
        # By gRPC. Of a call of an actor, Ray does not tell the replica when the caller has died (docs/adr/sessions).
        self._lease = handle.options(stream=True, _by_reference=False).lease
        self._describe = handle.describe
        self._new_port = port
        self._limits = limits
        self._ports: WeakValueDictionary[str, Port] = WeakValueDictionary()
        self._num_replaced = 0
        self.engines = KnownEngines()
        self.links = Links(certificates)

    async def take(self, session: str, tokens: Sequence[int], adapter: Adapter | None = None) -> ServeLease[Port]:
        """A lease from the first replica that grants one. Raises: Unavailable."""
        prefix = prefix_hashes(tokens, root_of(adapter))
        refused_by: set[str] = set()
        problem = ""
        try:
            async with asyncio.timeout(self._limits.lease_timeout_s):
                while True:
                    try:
                        answer = await self._ask(session, prefix, frozenset(refused_by), adapter)
                    except (RayError, grpc.RpcError) as error:
                        problem = f": {_cause(error)}"
                        await asyncio.sleep(GRANT_RETRY_S)
                        continue
                    if isinstance(answer, ServeLease):
                        return answer
                    if answer.replica_id in refused_by:  # a link that fails does so at once
                        await asyncio.sleep(GRANT_RETRY_S)
                    refused_by.add(answer.replica_id)
                    problem = f": {answer.reason}"
        except (TimeoutError, RayServeException) as error:
            waited = f"no {self._name} granted a lease within {self._limits.lease_timeout_s:g} s"
            raise Unavailable(waited + problem) from error

    async def describe(self) -> ModelInfo:
        """Raises: Unavailable."""
        try:
            info: ModelInfo = await asyncio.wait_for(
                outside_request_context(self._describe.remote), self._limits.lease_timeout_s
            )
        except (TimeoutError, RayError, RayServeException) as error:
            raise Unavailable(f"no {self._name} answers: {cause_of_death(error)}") from error
        return info

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Raises: StartupError, Unavailable."""
        call = outside_request_context(self._handle.load_adapter.remote, adapter)
        try:
            found: Adapter = await asyncio.wait_for(call, self._limits.reply_timeout_s)
        except (TimeoutError, RayError, RayServeException) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, StartupError):
                raise error.cause from None
            raise Unavailable(f"no {self._name} has loaded the adapter: {cause_of_death(error)}") from error
        return found

    def leave(self, stopping: Set[str], grace_s: float) -> None:
        """Move sessions off the engines of these replicas."""
        self.engines.drop(stopping)
        for port in list(self._ports.values()):
            port.leave(stopping, grace_s)

    async def report_wait(self, wait: DraftWait) -> None:
        """Raises: Unavailable."""
        report = outside_request_context(self._handle.report_wait.remote, wait.waited_s, wait.round_s)
        try:
            await asyncio.wait_for(report, REPORT_TIMEOUT_S)
        except (TimeoutError, RayError, RayServeException) as error:
            raise Unavailable(f"no {self._name} accepted the report: {cause_of_death(error)}") from error

    async def _ask(
        self, session: str, prefix: tuple[BlockHash, ...], refused_by: frozenset[str], adapter: Adapter | None
    ) -> ServeLease[Port] | Refusal:
        name = f"{session}@{secrets.token_hex(4)}"
        stream = outside_request_context(self._lease.remote, name, prefix, refused_by, adapter)
        try:
            answer: LeaseGrant | Refusal = await anext(stream)
            if isinstance(answer, Refusal):
                return answer
            link = await self.links.to(answer.engine_id, answer.link)
        except LinkError as error:
            stream.cancel()
            return Refusal(answer.replica_id, f"no link to an engine: {error}")
        except BaseException:  # also on cancellation: a lease that is being granted must end
            stream.cancel()
            raise
        return ServeLease(name, answer, self._port(answer, link), stream)

    def _port(self, grant: LeaseGrant, link: Link) -> Port:
        self.engines.add(grant.replica_id, grant.engine)
        port = self._ports.get(grant.engine_id)
        if port is None or port.has_broken_link:
            engine_id = grant.engine_id
            if port is not None:
                self._num_replaced += 1
                engine_id += f"/{self._num_replaced}"
            port = self._ports[grant.engine_id] = self._new_port(grant, link, self._limits.reply_timeout_s, engine_id)
        return port


def _cause(error: Exception) -> str:
    """Why a lease was not granted, in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return cause_of_death(error)


class ServeLeases:
    """Takes leases through the handles of the deployments; implements core.ports.Leases."""

    def __init__(
        self,
        target: DeploymentHandle,
        drafts: Sequence[tuple[DeploymentHandle, LinkTls | None]],
        limits: Limits,
        *,
        target_tls: LinkTls | None = None,
    ) -> None:
        """`drafts`, by number, and `target_tls` with the `link_tls` of their engines. Raises: ConfigError when one is
        wrong.
        """
        self._target = _Deployment(target, TargetEnginePort, limits, Certificates.of(target_tls))
        self._drafts = [_Deployment(draft, DraftEnginePort, limits, Certificates.of(tls)) for draft, tls in drafts]
        self._limits = limits

    async def take_target(
        self, session: str, tokens: Sequence[int] = (), adapter: Adapter | None = None
    ) -> ServeLease[TargetEnginePort]:
        """See `core.ports.Leases`. Raises: Unavailable when no replica grants a lease in time."""
        return await self._target.take(session, tokens, adapter)

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Have one target check an adapter; others load it with their first lease. Returns it, with its digest.

        Raises: StartupError if it cannot be served; Unavailable.
        """
        return await self._target.load_adapter(adapter)

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> ServeLease[DraftEnginePort]:
        """Raises: Unavailable when there is no such draft, or none of its replicas grants a lease in time."""
        return await self._draft(draft).take(session, tokens)

    def _draft(self, number: int) -> _Deployment[DraftEnginePort]:
        if number >= len(self._drafts):
            raise Unavailable("this service has no draft")
        return self._drafts[number]

    @property
    def link_troubles(self) -> LinkTroubles:
        """Counts of the links to targets and drafts together."""
        return sum((draft.links.troubles for draft in self._drafts), start=self._target.links.troubles)

    def leave(self, stopping: Set[str]) -> None:
        """Move sessions off stopping replicas: off drafts at once, off targets after `drain_grace_s`."""
        self._target.leave(stopping, self._limits.drain_grace_s)
        for draft in self._drafts:
            draft.leave(stopping, 0.0)

    async def report_wait(self, wait: DraftWait) -> None:
        """Report the waiting times of sessions to the first draft's autoscaling.

        Autoscaling adds up the replicas' numbers, so one report to any of them is enough. Raises: Unavailable.
        """
        if self._drafts:
            await self._drafts[0].report_wait(wait)

    async def target_stats(self) -> list[EngineStats]:
        """Current statistics of the targets on which this orchestrator has had leases."""
        return await self._target.engines.stats()

    async def describe_target(self) -> ModelInfo:
        """Raises: Unavailable."""
        return await self._target.describe()

    async def describe_draft(self, draft: int = 0) -> ModelInfo:
        """Raises: Unavailable."""
        return await self._draft(draft).describe()
