"""The servers of a client: addresses, one channel for each address in use, and the metadata of calls.

Knows gRPC's channel options; must not know requests, or whether the channels are blocking or asyncio's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from outrider_client._proto import details_pb2, generation_pb2_grpc
from outrider_client.errors import OutriderError
from outrider_client.options import Connection, Tls

Channel = TypeVar("Channel", grpc.Channel, grpc.aio.Channel)
OpenChannel = Callable[[str, list[tuple[str, Any]], grpc.ChannelCredentials | None], Channel]
"""Opens a channel from address, options and credentials; without credentials it is not encrypted."""
MIN_RECONNECT_MS = 100
"""Minimum delay before gRPC reconnects to an address after a failure."""
MAX_RECONNECT_MS = 5_000


class Servers(Generic[Channel]):
    """The servers of a client. Calls go to one until it fails, then to the next. May be shared by threads."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        open_channel: OpenChannel[Channel],
        connection: Connection,
        tls: Tls | None,
        token: str | None,
    ) -> None:
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        """Metadata of each call. On an unencrypted channel the token is readable by others."""
        self.is_closed = False
        self._addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self._addresses:
            raise ValueError("at least one address must be given")
        self._open_channel: OpenChannel[Channel] = open_channel
        self._options = _channel_options(connection, tls)
        self._credentials = _credentials(tls)
        self._current = 0
        self._channels: dict[str, Channel] = {}
        self._stubs: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return ", ".join(self._addresses)

    def current(self) -> tuple[str, Any]:
        """The address in use and its stub, which connects at its first call. Raises: OutriderError once closed."""
        with self._lock:
            if self.is_closed:
                raise OutriderError(grpc.StatusCode.CANCELLED, "this client has been closed")
            address = self._addresses[self._current]
            if address not in self._stubs:
                channel = self._open_channel(address, self._options, self._credentials)
                self._channels[address] = channel
                self._stubs[address] = _stub(channel)
            return address, self._stubs[address]

    def leave(self, address: str) -> None:
        """Switch from `address` to the next server, unless another call already did."""
        with self._lock:
            if self._addresses[self._current] == address:
                self._current = (self._current + 1) % len(self._addresses)

    def close(self) -> list[Channel]:
        """Make `current` raise from now on. Returns all channels, for the caller to close."""
        with self._lock:
            self.is_closed = True
            return list(self._channels.values())


def _stub(channel: Any) -> Any:
    """The methods of the service, and the health service's `Check`."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    stub.Check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=details_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=details_pb2.HealthCheckResponse.FromString,
    )
    return stub


def _channel_options(connection: Connection, tls: Tls | None) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", connection.max_message_bytes),
        ("grpc.max_send_message_length", connection.max_message_bytes),
        ("grpc.keepalive_time_ms", round(connection.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(connection.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: probe as long as a stream waits
        ("grpc.initial_reconnect_backoff_ms", MIN_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", round(connection.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def _credentials(tls: Tls | None) -> grpc.ChannelCredentials | None:
    if tls is None:
        return None
    return grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate)
