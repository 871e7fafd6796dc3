"""How a client connects and how it retries: frozen options, each with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Retry:
    """When a call that failed for a passing reason is made again."""

    max_retries: int = 8
    """In a row without an answer; whatever a stream receives sets the count back to 0. 0 never retries."""
    initial_backoff_s: float = 0.1
    """The n-th retry in a row waits a random time of up to this times 2^(n-1) ("full jitter")."""
    max_backoff_s: float = 10.0
    """With 8 retries, a server may be away for 13 s on average: Serve replaces a dead replica in less."""
    budget: int = 500
    """Retries of all calls of a client together; each call that is answered gives one back. So many streams may be
    broken off at once and resume, but a long outage is not met by a storm of retries."""

    def backoff_s(self, num_failures: int) -> float:
        """The longest pause after so many failures in a row."""
        return min(self.max_backoff_s, self.initial_backoff_s * 2.0 ** (num_failures - 1))


@dataclass(frozen=True, slots=True)
class Connection:
    """Of each channel."""

    max_message_bytes: int = 64 * 1024 * 1024
    """gRPC's own limit of 4 MiB is less than a reply with many logprobs may have."""
    connect_timeout_s: float = 5.0
    """For one attempt to connect; an address that does not answer at all takes so long to be given up."""
    keepalive_s: float = 120.0
    """A connection that is silent for so long is probed. Less than 100 s would make gRPC servers with default settings
    close it as abusive when a prompt waits for its first token for minutes."""
    keepalive_timeout_s: float = 20.0
    """How long a probe may take; after it the connection is dead, and its streams go on by another."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypts, and checks who the server is; with `certificate` and `private_key` the server can check the client."""

    root_certificates: bytes | None = None
    """PEM; None takes gRPC's own."""
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
    """Expected in the server's certificate instead of the host in the address."""
