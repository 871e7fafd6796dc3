"""Options for connections and retries, each with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_ADDRESS = "localhost:9000"
DEFAULT_TIMEOUT_S = 30.0
"""Default timeout in seconds of calls that are normally short."""
HEALTH_TIMEOUT_S = 2.0
POLL_S = 0.1
"""Seconds between two health checks of a server that does not serve yet."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries of calls that failed with a transient error."""

    max_retries: int = 8
    """Most retries in a row without an answer; each received chunk resets the count. 0 never retries."""
    initial_backoff_s: float = 0.1
    """The n-th retry in a row waits a random number of seconds up to this times 2^(n-1) ("full jitter")."""
    max_backoff_s: float = 10.0
    """With 8 retries the client waits 13 s for a server on average. Serve replaces a dead replica in less time."""
    budget: int = 500
    """Most retries of all calls of a client together; each answered call gives one back. This number of streams can
    break and resume at once, but a long outage causes no retry storm."""

    def backoff_s(self, num_failures: int) -> float:
        """The longest pause in seconds after `num_failures` failures in a row."""
        return min(self.max_backoff_s, self.initial_backoff_s * 2.0 ** (num_failures - 1))


@dataclass(frozen=True, slots=True)
class Connection:
    """Options of each channel."""

    max_message_bytes: int = 64 * 1024 * 1024
    """Largest reply in bytes. gRPC's own limit of 4 MiB is too small for replies with many logprobs."""
    connect_timeout_s: float = 5.0
    """Seconds for one attempt to connect."""
    keepalive_s: float = 120.0
    """Seconds of silence after which a connection is probed. With less than 100 s, gRPC servers with default settings
    close it as abusive when a prompt waits for its first token for minutes."""
    keepalive_timeout_s: float = 20.0
    """Timeout of a probe in seconds. After it the connection counts as dead, and its streams continue on another."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS. With `certificate` and `private_key` the server can authenticate the client, too."""

    root_certificates: bytes | None = None
    """Root certificates (PEM). None: gRPC's default roots."""
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name expected in the server's certificate instead of the host in the address."""
