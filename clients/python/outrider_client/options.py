"""How a client connects and how it retries: frozen options, each with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_ADDRESS = "localhost:9000"
DEFAULT_TIMEOUT_S = 30.0
"""Seconds for calls that are short unless something is wrong."""
HEALTH_TIMEOUT_S = 2.0
POLL_S = 0.1
"""Seconds between two checks of a server that does not serve yet."""


@dataclass(frozen=True, slots=True)
class Retry:
    """When a call is repeated that failed for a passing reason."""

    max_retries: int = 8
    """Most retries in a row without an answer; each received chunk sets the count back to 0. 0 never retries."""
    initial_backoff_s: float = 0.1
    """The n-th retry in a row waits a random number of seconds up to this times 2^(n-1) ("full jitter")."""
    max_backoff_s: float = 10.0
    """With 8 retries, a server may be away for 13 s on average: Serve replaces a dead replica in less."""
    budget: int = 500
    """Most retries of all calls of a client together; each answered call gives one back. This number of streams may
    break at once and resume, but a long outage causes no storm of retries."""

    def backoff_s(self, num_failures: int) -> float:
        """The longest pause in seconds after `num_failures` failures in a row."""
        return min(self.max_backoff_s, self.initial_backoff_s * 2.0 ** (num_failures - 1))


@dataclass(frozen=True, slots=True)
class Connection:
    """Options of each channel."""

    max_message_bytes: int = 64 * 1024 * 1024
    """Longest reply in bytes. gRPC's own limit of 4 MiB is less than a reply with many logprobs may have."""
    connect_timeout_s: float = 5.0
    """Seconds for one attempt to connect, after which an address without an answer is given up."""
    keepalive_s: float = 120.0
    """Seconds of silence after which a connection is probed. With less than 100 s, gRPC servers with default settings
    close it as abusive when a prompt waits for its first token for minutes."""
    keepalive_timeout_s: float = 20.0
    """Seconds for a probe; without an answer by then the connection is dead, and its streams continue on another."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypts, and authenticates the server; with `certificate` and `private_key` the server can check the client."""

    root_certificates: bytes | None = None
    """Root certificates (PEM); None takes gRPC's own."""
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name expected in the server's certificate instead of the host in the address."""
