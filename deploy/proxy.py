"""How Serve's gRPC proxy takes our streams: so that a client that goes away always reaches the replica.

The proxy (Ray 2.60) passes a cancellation on only if it comes while the proxy waits for the replica's next message. If
it comes while a message is being written to the client, the stream is merely dropped, the replica is not told, and
decodes for nobody until the output is complete. Here a dropped stream is made to wait once more, and cancelled there.

Runs in the proxy's process, which imports it by the name in `deploy.cluster.SERVICERS`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from protos.outrider.v1 import generation_pb2_grpc

Handler = Callable[..., Any]


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
