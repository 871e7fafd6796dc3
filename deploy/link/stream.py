"""Frames on a byte stream, each with one protobuf message.

A frame is four bytes of length, big endian, then the content. A reader accepts bytes in pieces of any size; an outbox
accepts frames from the engine's thread. Must not know the message types.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame in bytes: a prompt of a million tokens takes 3 MiB, the largest block with q 13 MiB. A
larger request is refused."""
KEEPALIVE_S = 5
"""Seconds between keep-alive probes. A dead machine is noticed within three times this, even on an idle link."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Bytes that may wait for a slow reader; above this limit the link is closed."""

Kind = TypeVar("Kind", bound=Message)


class LinkError(Exception):
    """The other end sent something invalid. The link is closed, with the reason."""


class FrameTooLong(LinkError):
    """The frame is larger than the limit."""


def framed(content: bytes, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """`content` as a frame. Raises: FrameTooLong."""
    if len(content) > max_bytes:
        raise FrameTooLong(f"a frame of {len(content)} bytes; at most {max_bytes} are allowed")
    return len(content).to_bytes(HEADER_BYTES, "big") + content


class FrameReader:
    """Splits the arriving bytes into frames."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """Largest next frame; smaller until the handshake is complete."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames completed by `data`, in order. Raises: FrameTooLong, as soon as the length is known."""
        self._rest += data
        while len(self._rest) >= HEADER_BYTES:
            num_bytes = int.from_bytes(self._rest[:HEADER_BYTES], "big")
            if num_bytes > self.max_bytes:
                raise FrameTooLong(f"a frame of {num_bytes} bytes; at most {self.max_bytes} are allowed")
            end = HEADER_BYTES + num_bytes
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[HEADER_BYTES:end])
            del self._rest[:end]
            yield frame

    @property
    def is_between_frames(self) -> bool:
        """Whether no partial frame is waiting, so that the stream may end here."""
        return not self._rest


def parse(kind: type[Kind], frame: bytes) -> Kind:
    """Decode the message in a frame. Raises: LinkError."""
    try:
        return kind.FromString(frame)
    except DecodeError as error:
        raise LinkError(f"a frame that is not a {kind.DESCRIPTOR.name}") from error


def tune(transport: asyncio.BaseTransport) -> None:
    """Set socket options: send small frames at once, and notice a dead peer."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * KEEPALIVE_S)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The peer's address, for the log."""
    return name_of(transport.get_extra_info("peername"))


def name_of(address: Any) -> str:
    """A socket address as host:port, for the log."""
    return f"{address[0]}:{address[1]}" if address else "a peer that has disconnected"


class Outbox:
    """Sends frames from any thread, in order: directly if the kernel accepts them, else on the event loop.

    Waking the event loop for each frame would double its cost. The calling thread therefore writes to the socket
    itself, unless earlier frames are still waiting.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, fail: Callable[[str], None]
    ) -> None:
        """`fail` is called on the event loop, with the reason, when the peer does not read."""
        self._transport = transport
        self._loop = loop
        self._fail = fail
        self._lock = threading.Lock()
        self._num_queued = 0
        """Parts that wait for the event loop."""
        self._direct = _second_handle(transport)

    def send(self, frame: bytes) -> None:
        """Send without waiting. No effect once the connection has ended."""
        with self._lock:
            rest = frame[self._write_now(frame) :]
            if rest:
                self._num_queued += 1
        if rest:
            self._loop.call_soon_threadsafe(self._write_later, rest)

    def close(self) -> None:
        with self._lock:
            if self._direct is not None:
                self._direct.close()
                self._direct = None

    def _write_now(self, frame: bytes) -> int:
        """Write to the socket; returns the number of bytes that the kernel accepted."""
        if self._direct is None or self._num_queued or self._transport.get_write_buffer_size():
            return 0
        try:
            return self._direct.send(frame)
        except OSError:  # it would block, or the connection has ended, which the event loop notices
            return 0

    def _write_later(self, rest: bytes) -> None:
        with self._lock:
            self._num_queued -= 1
            if not self._transport.is_closing():
                self._transport.write(rest)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("it does not read what it asked for")


def _second_handle(transport: asyncio.Transport) -> socket.socket | None:
    """A second handle of the connection, for threads other than the event loop's; None with TLS."""
    if transport.get_extra_info("sslcontext") is not None:
        return None
    handle = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    handle.setblocking(False)
    return handle
