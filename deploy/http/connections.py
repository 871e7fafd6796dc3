"""Connections of Serve's HTTP server (uvicorn 0.54), for two kinds of clients that it would not answer.

HTTP/1.0 clients get uvicorn's slower parser: the other one replies in chunks, which they cannot read. A client that has
sent its request and closed its side of the connection still gets its reply; uvicorn would assume it is gone.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Transport
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Interim response to test a connection. Clients ignore it."""
PROBE_S = 0.25
MAX_LINE_BYTES = 8192
"""Longest first line to wait for, in bytes; after that the parser decides."""


class _AnswersHalfClosed:
    """Answers clients that have closed their side of the connection.

    Such a client may be gone completely, which shows only when the server sends. A second probe, or a second piece of a
    stream, then fails and ends the call.
    """

    cycle: Any
    transport: Transport
    loop: AbstractEventLoop
    pipeline: Sequence[Any] = ()

    def eof_received(self) -> bool:
        """Return whether the connection stays open."""
        cycle = self.cycle
        is_over = cycle is None or cycle.response_complete or cycle.more_body
        if is_over or self.transport.get_extra_info("sslcontext") is not None:
            return False
        cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        cycle = self.cycle
        if cycle.response_started or cycle.disconnected or self.transport.is_closing():
            return
        if cycle.scope["http_version"] == "1.1" and not self.pipeline:
            self.transport.write(PROBE)
        self.loop.call_later(PROBE_S, self._probe)


class OldConnection(_AnswersHalfClosed, H11Protocol):  # type: ignore[misc]  # eof_received returns nothing there
    """An HTTP/1.0 connection. A reply of unknown length ends with the connection."""


class Connection(_AnswersHalfClosed, HttpToolsProtocol):  # type: ignore[misc]  # as above
    """An HTTP/1.1 connection. It hands over to `OldConnection` if the client uses HTTP/1.0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first: bytes | None = b""
        """Bytes received before the HTTP version is known; None after that."""

    def data_received(self, data: bytes) -> None:
        if self._first is None:
            super().data_received(data)
            return
        self._first += data
        line, end, _ = self._first.partition(b"\n")
        if not end and len(line) < MAX_LINE_BYTES:
            return
        first, self._first = self._first, None
        if line.rstrip().endswith(b" HTTP/1.0"):
            self._become_old(first)
        else:
            super().data_received(first)

    def _become_old(self, data: bytes) -> None:
        self.connections.discard(self)
        old = OldConnection(self.config, self.server_state, self.app_state, self.loop)
        old.connection_made(self.transport)
        self.transport.set_protocol(old)
        old.data_received(data)
