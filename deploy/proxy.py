"""How Serve's gRPC proxy takes our calls: clients that go away reach the replica, and a node that is to go says so.

The proxy (Ray 2.60) passes a cancellation on only if it comes while the proxy waits for the replica's next message. If
it comes while a message is being written to the client, the stream is merely dropped, the replica is not told, and
decodes for nobody until the output is complete. Here a dropped stream is made to wait once more, and cancelled there.

Health is the application's, asked through the proxy; but a proxy whose node drains (a pod that is to stop, a node that
is given back) says NOT_SERVING by itself, so that load balancers leave it before it leaves them. Ray takes seconds to
hear of it, and to say so; a file that whoever stops the node leaves there is seen at once.

Runs in the proxy's process, which imports it by the name in `deploy.cluster.SERVICERS`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.outrider.v1 import generation_pb2_grpc

Handler = Callable[..., Any]

STOP_FILE = "OUTRIDER_STOP_FILE"
"""The environment may name a file here, which is there from the moment when this node is to stop."""
BEGAN_S = time.time()
"""A file from before that belongs to an earlier life: a container that is started anew finds the folders of its pod."""

NOT_SERVING: bytes = health_pb2.HealthCheckResponse(
    status=health_pb2.HealthCheckResponse.NOT_SERVING
).SerializeToString()


def add_generation_service(servicer: Any, server: Any) -> None:
    """What Serve calls to learn the methods of the service; `server` is its gRPC server, which makes the handlers."""
    make_handler = server.service_handler_factory

    def make_attentive_handler(**method: Any) -> Handler:
        handler: Handler = make_handler(**method)
        return attentive(handler) if inspect.isasyncgenfunction(handler) else handler

    server.service_handler_factory = make_attentive_handler
    try:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = make_handler


def add_health_service(servicer: Any, server: Any) -> None:
    """The same for the health of the service. The factory of handlers is a method of the proxy itself (Ray 2.60)."""
    make_handler = server.service_handler_factory
    proxy = make_handler.__self__

    def make_honest_handler(**method: Any) -> Handler:
        handler: Handler = make_handler(**method)
        is_check = method["service_method"].endswith("/Check") and not inspect.isasyncgenfunction(handler)
        return honest(handler, proxy._is_draining) if is_check else handler

    server.service_handler_factory = make_honest_handler
    try:
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = make_handler


def is_to_stop() -> bool:
    """Whether somebody has left the file that says so, since this process began."""
    path = os.environ.get(STOP_FILE)
    try:
        return path is not None and Path(path).stat().st_mtime >= BEGAN_S
    except FileNotFoundError:
        return False


def honest(handler: Handler, is_draining: Callable[[], bool]) -> Handler:
    """The same answer, but NOT_SERVING while the proxy drains, or its node is to stop."""

    async def check(request: Any, context: Any) -> bytes:
        if is_draining() or is_to_stop():
            return NOT_SERVING
        answer: bytes = await handler(request, context)
        return answer

    return check


def attentive(handler: Handler) -> Handler:
    """The same stream, but when it is dropped between two messages, whatever feeds it is cancelled."""

    async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        messages = handler(request, LastingContext(context))
        try:
            async for message in messages:
                yield message
        except GeneratorExit:
            await _cancel(messages)
            raise

    return stream


class LastingContext:
    """A call's context that may be asked for its peer when the call is done, as Serve does for its access log.

    gRPC reads the peer from the call itself, and crashes the process once that is gone.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer: str = context.peer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def peer(self) -> str:
        return self._peer


async def _cancel(stream: AsyncIterator[Any]) -> None:
    """Cancel `stream` where it waits for its next message: there alone it passes the cancellation on."""
    reader = asyncio.ensure_future(_exhaust(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])


async def _exhaust(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass
