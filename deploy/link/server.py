"""The engine's end of its links: passes requests to the engine's thread, and sends its replies.

Knows frames and the engine's loop; must not know Ray. It runs on the event loop that starts it; replies arrive on the
engine's thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from core.errors import StartupError, WorkerLost
from core.records import Stamp, is_last
from deploy.link.address import LinkAddress
from deploy.link.handshake import HANDSHAKE_TIMEOUT_S, KEY_BYTES, MAX_HANDSHAKE_BYTES, admit, challenge
from deploy.link.replies import Reply, encode_loss, encode_replies, encode_working
from deploy.link.requests import Request, decode_requests
from deploy.link.stream import (
    MAX_FRAME_BYTES,
    FrameReader,
    FrameTooLong,
    LinkError,
    Outbox,
    framed,
    name_of,
    parse,
    peer_of,
    tune,
)
from deploy.link.tls import Certificates
from protos.outrider.link.v1 import link_pb2 as pb

logger = logging.getLogger(__name__)

MAX_PENDING = 64
"""Most connections with an unfinished handshake; further ones are closed."""
MAX_OPEN_REQUESTS = 4096
"""Unanswered requests of one link above which the server stops reading from it."""
ACCEPT_RETRY_S = 1.0
LEFT = "the peer closed the connection, perhaps because it does not trust this engine's certificate"

Post = Callable[[Sequence[Any], Any], None]
"""`workers.engine.thread.EngineLoop.post`."""


class LinkServer:
    """Listens for orchestrators on behalf of one engine."""

    post: Post

    def __init__(self, epoch: int, kinds: tuple[type[Request], ...], certificates: Certificates | None = None) -> None:
        """`certificates` for links with TLS."""
        self.epoch = epoch
        self.kinds = kinds
        """Types of requests that the engine accepts."""
        self.key = secrets.token_bytes(KEY_BYTES)
        self.links: set[EngineLink] = set()
        """Open connections, including those with an unfinished handshake."""
        self.pending: set[EngineLink] = set()
        """Connections with an unfinished handshake."""
        self._certificates = certificates
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[NoReturn] | None = None
        self._joining: set[asyncio.Task[None]] = set()
        """Connections being set up, for example during the TLS handshake."""

    def bind(self, host: str, ports: tuple[int, int]) -> None:
        """Take the first free port of the inclusive range. Raises: StartupError if there is none."""
        first, last = ports
        for port in range(first, last + 1):
            try:
                self._listener = _listener(host, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise StartupError(f"cannot listen for links at {host} port {port}: {error}") from error
            return
        raise StartupError(f"ports {first} to {last} of {host} are all in use; engine.link_ports sets others")

    def start(self, post: Post) -> LinkAddress:
        """Accept links at the port that `bind` took. Requests go to `post`."""
        assert self._listener is not None, "`bind` comes first"
        self.post = post
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))
        host, port, *_ = self._listener.getsockname()
        return LinkAddress(host, port, self.epoch, self.key, has_tls=self._certificates is not None)

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
        for task in self._joining:
            task.cancel()
        for link in self.links:
            link.end()

    async def _accept(self, listener: socket.socket) -> NoReturn:
        """Accept connections. `asyncio.start_server` with TLS neither reports refused peers nor limits new ones."""
        while True:
            try:
                connection, peer = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # for example no free file descriptor
                logger.warning("a link could not be taken: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if len(self._joining) + len(self.pending) >= MAX_PENDING:
                _log_closed(name_of(peer), f"{MAX_PENDING} connections have not ended their handshake")
                connection.close()
                continue
            task = asyncio.create_task(self._join(connection, name_of(peer)))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _join(self, connection: socket.socket, peer: str) -> None:
        tls = self._certificates.for_engine() if self._certificates is not None else None
        timeout_s = HANDSHAKE_TIMEOUT_S if tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: EngineLink(self), connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            _log_closed(peer, f"TLS failed: {str(error) or LEFT}" if tls is not None else str(error))


class EngineLink(asyncio.Protocol):
    """One orchestrator's connection. An error closes this link alone, with one line in the log.

    `take`, `working` and `lose` are called on the engine's thread, all other methods on the event loop.
    """

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._challenge = challenge()
        self._num_open = 0
        """Requests not yet answered by the engine."""
        self._is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._peer = peer_of(transport)
        self._outbox = Outbox(self._transport, self._loop, self._close_for)
        self._handshake_timer = self._loop.call_later(
            HANDSHAKE_TIMEOUT_S, self._close_for, f"it has not ended its handshake within {HANDSHAKE_TIMEOUT_S:g} s"
        )
        self._server.links.add(self)
        self._server.pending.add(self)
        tune(transport)
        self._outbox.send(framed(self._challenge.SerializeToString()))

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._take_requests(frame) if self._is_admitted else self._admit(frame)
        except LinkError as error:
            self._close_for(str(error))

    def eof_received(self) -> None:
        if not self._reader.is_between_frames:
            self._close_for("the peer closed it within a frame")

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._close_for(f"it broke: {error}")
        self._handshake_timer.cancel()
        self._server.pending.discard(self)
        self._server.links.discard(self)
        self._is_closed = True
        self._outbox.close()

    def end(self) -> None:
        """Close the link, even if requests are waiting."""
        self._is_closed = True
        self._transport.abort()

    @property
    def _is_admitted(self) -> bool:
        return self._reader.max_bytes == MAX_FRAME_BYTES

    def _admit(self, frame: bytes) -> None:
        welcome = admit(parse(pb.Hello, frame), self._challenge, self._server.epoch, self._server.key)
        self._handshake_timer.cancel()
        self._server.pending.discard(self)
        self._reader.max_bytes = MAX_FRAME_BYTES
        self._outbox.send(framed(welcome.SerializeToString()))

    def _take_requests(self, frame: bytes) -> None:
        batch = decode_requests(frame)
        if not all(isinstance(request, self._server.kinds) for request in batch):
            raise LinkError(f"this engine takes only a {self._server.kinds[0].__name__}")
        self._num_open += len(batch)
        if self._num_open > MAX_OPEN_REQUESTS:
            self._transport.pause_reading()
        try:
            self._server.post(batch, self)
        except WorkerLost as lost:
            self.lose(lost)

    def _answered(self, num_replies: int) -> None:
        was_full = self._num_open > MAX_OPEN_REQUESTS
        self._num_open -= num_replies
        if was_full and self._num_open <= MAX_OPEN_REQUESTS and not self._is_closed:
            self._transport.resume_reading()

    def _close_for(self, reason: str) -> None:
        """Close the link and log the reason; later reasons are ignored."""
        if not self._is_closed:
            self._is_closed = True
            _log_closed(self._peer, reason)
            self._transport.abort()

    # On the engine's thread

    def take(self, replies: Sequence[Reply]) -> None:
        """Send the replies that a step has completed."""
        try:
            self._outbox.send(_in_frames(replies))
        except Exception as error:  # a defect here must not end the engine
            logger.exception("%d replies could not be sent", len(replies))
            self._loop.call_soon_threadsafe(self._close_for, f"a reply could not be sent: {error}")
        self._loop.call_soon_threadsafe(self._answered, sum(map(is_last, replies)))

    def working(self, stamps: Sequence[Stamp]) -> None:
        """Report that the engine is making steps and still has these requests."""
        self._outbox.send(framed(encode_working(stamps)))

    def lose(self, end: WorkerLost) -> None:
        """Report that the engine has failed, with the reason."""
        self._outbox.send(framed(encode_loss(str(end))))


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=MAX_PENDING)
    listener.setblocking(False)
    return listener


def _log_closed(peer: str, reason: str) -> None:
    logger.warning("the link from %s is closed: %s", peer, reason)


def _in_frames(replies: Sequence[Reply]) -> bytes:
    """The replies as one frame, or as several if one would be too long. Raises: FrameTooLong for a single reply."""
    try:
        return framed(encode_replies(replies))
    except FrameTooLong:
        if len(replies) == 1:
            raise
        middle = len(replies) // 2
        return _in_frames(replies[:middle]) + _in_frames(replies[middle:])
