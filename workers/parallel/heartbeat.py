"""Notifies the ranks of a group at once when one of them has died, even while the group is idle.

Each follower keeps a connection to rank 0 open, on which it sends only a goodbye. The kernel closes the connection when
a process dies, and its keep-alive probes detect a lost machine or network. Collectives are no substitute: they notice a
death only while they are used, and on some devices never. Knows sockets; must not know models or collectives.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

logger = logging.getLogger(__name__)

GOODBYE = b"."
KEEP_ALIVE_S = 1
"""Interval of the kernel's keep-alive probes; two without an answer close the connection."""
TOKEN_CHARS = 32
RANK_BYTES = 4


class Heartbeat:
    """One rank's connections: to all followers on rank 0, to rank 0 on a follower."""

    def __init__(self, peers: Mapping[socket.socket, str], on_loss: Callable[[str], None]) -> None:
        self.lost: str | None = None
        """Why the group is lost; None while it lives, and after a goodbye."""
        self._on_loss = on_loss
        self._is_leaving = False
        self._peers = dict(peers)
        self._wake, self._woken = socket.socketpair()
        for peer in self._peers:
            _keep_alive(peer)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, *, goodbye: bool) -> None:
        """Leave the group. Without a goodbye the others report a loss."""
        self._is_leaving = True
        if goodbye:
            for peer in self._peers:
                with suppress(OSError):  # it is gone already
                    peer.sendall(GOODBYE)
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        """Wait until this end leaves, a rank is lost, or all have said goodbye."""
        silent: set[socket.socket] = {*self._peers, self._woken}
        try:
            while len(silent) > 1 and self._woken in silent and self.lost is None:
                for end in _readable(silent):
                    silent.remove(end)
                    if end is not self._woken:
                        self._read(end)
        finally:
            self._close_all()

    def _read(self, peer: socket.socket) -> None:
        """Read a goodbye, or handle a closed connection."""
        try:
            received = peer.recv(1)
        except OSError as error:
            logger.info("%s: %s", self._peers[peer], error)
            received = b""
        if received != GOODBYE and self.lost is None and not self._is_leaving:
            self.lost = f"{self._peers[peer]} is gone"
            self._on_loss(self.lost)

    def _close_all(self) -> None:
        """Close all connections. On rank 0 this also notifies the other followers."""
        for end in (*self._peers, self._woken):
            end.close()


def _readable(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Wait for one or more of them to have data or be closed."""
    with selectors.DefaultSelector() as selector:
        for end in sockets:
            selector.register(end, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select()]  # type: ignore[misc]  # what was registered is a socket


class HeartbeatListener:
    """Rank 0's listener for its followers, which authenticate with `token`."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, None)[0][0]
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_CHARS // 2)

    def accept_followers(self, size: int, timeout_s: float) -> dict[socket.socket, str]:
        """The connections of all followers. Raises: TimeoutError when one of them does not connect in time."""
        followers: dict[int, socket.socket] = {}
        with self._listener as listener:
            listener.settimeout(timeout_s)
            while len(followers) < size - 1:
                connection, address = listener.accept()
                connection.settimeout(timeout_s)
                rank = _authenticate(connection, self.token)
                if rank is None:
                    logger.warning("closed a connection from %s: its token is not that of this group of ranks", address)
                    connection.close()
                else:
                    followers[rank] = connection
        return {connection: f"rank {rank}" for rank, connection in followers.items()}


def connect(address: str, port: int, token: str, rank: int, timeout_s: float) -> dict[socket.socket, str]:
    """A follower's connection to rank 0. Raises: OSError."""
    connection = socket.create_connection((address, port), timeout_s)
    connection.sendall(token.encode() + rank.to_bytes(RANK_BYTES, "big"))
    return {connection: "rank 0"}


def _authenticate(connection: socket.socket, token: str) -> int | None:
    """The rank of the process that has connected; None if its token is wrong."""
    try:
        received = connection.recv(TOKEN_CHARS + RANK_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        logger.info("a connection closed before it sent its token: %s", error)
        return None
    is_ours = secrets.compare_digest(received[:TOKEN_CHARS], token.encode())
    return int.from_bytes(received[TOKEN_CHARS:], "big") if is_ours else None


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel detect a lost machine or network within about 3 s."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", KEEP_ALIVE_S), ("TCP_KEEPINTVL", KEEP_ALIVE_S), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
