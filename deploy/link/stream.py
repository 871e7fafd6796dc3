"""A link's connection: frames, each with one protobuf message, on a stream of bytes.

A frame is four bytes of length, big endian, then the content. A reader takes bytes as they come, in pieces of any size;
an outbox takes frames from the engine's thread. Must not know which messages there are.
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
"""Largest frame in bytes: a prompt of a million tokens takes 3 MiB, the largest block with q 13 MiB. Larger messages go
by actor calls."""
KEEPALIVE_S = 5
"""Seconds; a peer whose machine is gone is noticed within three times this, also on an idle link."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Bytes that may wait for a peer that reads too slowly; above it the link is closed."""

Kind = TypeVar("Kind", bound=Message)


class LinkError(Exception):
    """The other end sent something wrong; the link is closed, with the reason."""


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
        """Longest next frame; less before the handshake has ended."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete with `data`, in order. Raises: FrameTooLong, before the frame has arrived."""
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
        """Whether no part of a frame is waiting, so that the stream may end here."""
        return not self._rest


def parse(kind: type[Kind], frame: bytes) -> Kind:
    """Decode the message in a frame. Raises: LinkError."""
    try:
        return kind.FromString(frame)
    except DecodeError as error:
        raise LinkError(f"a frame that is not a {kind.DESCRIPTOR.name}") from error


def tune(transport: asyncio.BaseTransport) -> None:
    """Set socket options: small frames are sent at once, and a dead peer is noticed."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * KEEPALIVE_S)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Address of the peer, for the log."""
    return name_of(transport.get_extra_info("peername"))


def name_of(address: Any) -> str:
    """host:port of a socket address, for the log."""
    return f"{address[0]}:{address[1]}" if address else "a peer that has disconnected"


class Outbox:
    """Sends frames from any thread, in order: directly while the kernel takes them, else on the event loop.

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
        """Send without waiting; after the connection's end, without effect."""
        with self._lock:
            rest = frame[self._write_now(frame) :]
            if rest:
                self._num_queued += 1
        if rest:
            self._loop.call_soon_threadsafe(self._write_later, rest)

    def close(self) -> None:
        """Stop writing."""
        with self._lock:
            if self._direct is not None:
                self._direct.close()
                self._direct = None

    def _write_now(self, frame: bytes) -> int:
        """The number of bytes that the kernel has taken."""
        if self._direct is None or self._num_queued or self._transport.get_write_buffer_size():
            return 0
        try:
            return self._direct.send(frame)
        except OSError:  # it would block, or the connection has ended, which the event loop finds out by itself
            return 0

    def _write_later(self, rest: bytes) -> None:
        with self._lock:
            self._num_queued -= 1
            if not self._transport.is_closing():
                self._transport.write(rest)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("it does not read what it asked for")


def _second_handle(transport: asyncio.Transport) -> socket.socket | None:
    """A handle of the connection for other threads than the event loop's; None with TLS."""
    if transport.get_extra_info("sslcontext") is not None:
        return None
    handle = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    handle.setblocking(False)
    return handle
