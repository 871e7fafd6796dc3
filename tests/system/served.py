"""The real system: Ray, Serve, three deployments, gRPC on a real socket; on a cluster of its own or on a shared one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from ray import serve

from bench.harness.probe import engine_of
from core.config import ServiceConfig
from deploy.app import APPLICATION
from deploy.launch import application
from deploy.launch.cluster import Endpoints
from deploy.launch.local import served
from outrider_client import Client
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc

READY_TIMEOUT_S = 60.0
EXPORT_PERIOD_S = 2.0
"""Export period of metrics in the cluster that tests share, instead of Ray's ten seconds."""
MAX_TRIES = 20
"""On a busy machine an output may have ended before its draft has said anything."""
MAX_SESSIONS = 24
"""Session limit of the service that tests share: more than any test needs at once, and few enough to fill it."""


@dataclass(frozen=True)
class Server:
    """Where it listens, and a view of its engines for what clients cannot see."""

    address: str

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, [("grpc.max_receive_message_length", -1)])

    def stub(self, channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationServiceStub:
        return generation_pb2_grpc.GenerationServiceStub(channel)

    async def stats(self, role: str) -> Any:
        return await (await engine_of(role)).stats.remote()


@dataclass(frozen=True)
class Guarded(Server):
    """One that asks for a token, by gRPC and by HTTP."""

    http_port: int
    token: ClassVar = "a-token"
    max_sessions: ClassVar = 8

    @property
    def url(self) -> str:
        return f"http://localhost:{self.http_port}"


@contextmanager
def server(config: ServiceConfig) -> Iterator[Server]:
    """On a cluster of its own."""
    with served(config, lambda _: None) as endpoints:
        yield Server(f"localhost:{endpoints.grpc_port}")


@contextmanager
def deployed_for(config: ServiceConfig, cluster: Endpoints) -> Iterator[Server]:
    """On a cluster that runs, where nothing else may be served, for as long as the block."""
    yield deployed(config, cluster)
    serve.delete(APPLICATION)


def deployed(config: ServiceConfig, cluster: Endpoints) -> Server:
    """In place of what is served on a cluster that runs; it ends with its cluster."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    application.run(config)
    address = f"localhost:{cluster.grpc_port}"
    with Client(address) as client:
        client.wait_until_serving(READY_TIMEOUT_S)
    return Server(address)


async def tokens(stub: Any, request: pb.GenerateRequest) -> list[int]:
    """All of a stream's token ids."""
    return [token async for chunk in stub.GenerateStream(request) for token in chunk.token_ids]


async def each(limit: int, jobs: Any) -> AsyncIterator[Any]:
    """Results of coroutine functions in order, at most `limit` at once."""
    gate = asyncio.Semaphore(limit)

    async def run(job: Any) -> Any:
        async with gate:
            return await job()

    for result in await asyncio.gather(*map(run, jobs)):
        yield result
