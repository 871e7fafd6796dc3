"""For threads. `outrider_client._io.aio` has the same names."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeAlias

import grpc

from outrider_client._proto import generation_pb2 as pb

Channel: TypeAlias = grpc.Channel
CANCELLED: tuple[type[BaseException], ...] = ()
"""Empty: a thread's wait cannot be cancelled."""
Event = threading.Event
sleep = time.sleep


def open_channel(
    address: str, options: list[tuple[str, Any]], credentials: grpc.ChannelCredentials | None
) -> grpc.Channel:
    """A channel; it connects at its first call."""
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def close_channel(channel: grpc.Channel) -> None:
    """Close the channel and end its calls."""
    channel.close()


def wait(event: threading.Event, timeout_s: float) -> None:
    """Wait until the event is set or the time is over."""
    event.wait(timeout_s)


def reply_of(reply: Any) -> Any:
    """The reply to a unary call. Blocking calls return the reply itself."""
    return reply


class Reading:
    """A streaming call. Garbage collection cancels it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def cancel(self) -> None:
        self._call.cancel()

    def read(self) -> pb.GenerateChunk | None:
        """The next message; None after the last. Raises: grpc.RpcError."""
        message: pb.GenerateChunk | None = next(self._call, None)
        return message


class Closing:
    """`contextlib.closing` calls `close`."""
