"""For asyncio. `outrider_client._io.blocking` has the same names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc

from outrider_client._io import Cut
from outrider_client._proto import generation_pb2 as pb

Channel: TypeAlias = grpc.aio.Channel
CANCELLED = asyncio.CancelledError
"""Raised when a wait is cancelled from outside."""
Event = asyncio.Event
sleep = asyncio.sleep


def open_channel(
    address: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    """A channel; it connects at its first call."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


async def close_channel(channel: grpc.aio.Channel) -> None:
    """Close the channel and end its calls."""
    await channel.close(None)


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def reply_of(call: Awaitable[Any]) -> Any:
    """The reply to a unary call. Raises: Cut; grpc.RpcError."""
    try:
        return await call
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        raise Cut from None


class AsyncReading:
    """A streaming call. Garbage collection cancels it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, and after the loop has closed, which ends the call.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    def cancel(self) -> None:
        self._call.cancel()

    async def read(self) -> pb.GenerateChunk | None:
        """The next message; None after the last. Raises: Cut; grpc.RpcError."""
        message = await reply_of(self._call.read())
        return message if isinstance(message, pb.GenerateChunk) else None


class AsyncClosing:
    """`aclose`, which `contextlib.aclosing` calls."""

    def close(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        """The same as `close`."""
        self.close()


def _is_cancelled() -> bool:
    """Whether this task is being cancelled, not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
