"""What both ends do to their sockets, and how a thread that computes writes to one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

KEEPALIVE_S = 5
"""A peer whose machine is gone is noticed within three times this long, whether or not anything is under way."""
MAX_UNSENT_BYTES = 64 * 2**20
"""For a peer that reads too slowly, or not at all."""


def tune(transport: asyncio.BaseTransport) -> None:
    """Have a small frame go out at once, and a dead peer be noticed."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * KEEPALIVE_S)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """For the log."""
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "somebody who has left"


class Outbox:
    """Sends frames from any thread."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, fail: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._fail = fail

    def send(self, frame: bytes) -> None:
        self._loop.call_soon_threadsafe(self._write, frame)

    def _write(self, frame: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("it does not read what it asked for")

    def close(self) -> None:
        """Nothing is sent any more."""
