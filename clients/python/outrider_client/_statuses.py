"""Converts gRPC's errors to the client's, with the server's field and retry delay.

Knows status codes, details and trailers; must not know which call failed or how it is handled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from outrider_client import errors
from outrider_client._proto import details_pb2
from outrider_client.errors import OutriderError

DETAILS_KEY = "grpc-status-details-bin"
_KINDS: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.ServiceError,
    # A proxy returns INTERNAL when the server behind it dies; repeating a generation is harmless. UNKNOWN is not
    # retried: gRPC servers return it for a call that they cannot parse, which would fail again.
    grpc.StatusCode.INTERNAL: errors.ServiceError,
    grpc.StatusCode.ABORTED: errors.ServiceError,
    # Comes from a proxy or a stopping replica that resets the stream; this client's own cancellations do not get here.
    grpc.StatusCode.CANCELLED: errors.ServiceError,
}
_TOO_LONG = "message larger than max"
"""gRPC returns RESOURCE_EXHAUSTED for a message over the size limit, too; retrying would not help."""
_FIELD = re.compile(r"([a-z_]+(?:\.[a-z_]+|\[\d+\])*): ")
"""Field at the beginning of an error message. Serve drops the trailers of a stream, so the server puts it there."""


def error_of(error: grpc.RpcError) -> OutriderError:
    """The client's error for a failed gRPC call."""
    code, message = error.code(), error.details() or "the server gave no reason"
    kind = OutriderError if _TOO_LONG in message else _KINDS.get(code, OutriderError)
    details = list(_details(error.trailing_metadata()))
    field = _field(details, message) if kind is errors.InvalidRequest else None
    return kind(code, message, field, _retry_after_s(details), _request_id(details))


def _details(trailers: Iterable[Any] | None) -> Iterable[Message]:
    status = details_pb2.Status()
    try:
        for key, value in trailers or ():
            if key == DETAILS_KEY and isinstance(value, bytes):
                status.MergeFromString(value)
        for packed in status.details:
            match packed.type_url.rpartition("/")[2]:
                case "google.rpc.RetryInfo":
                    yield details_pb2.RetryInfo.FromString(packed.value)
                case "google.rpc.RequestInfo":
                    yield details_pb2.RequestInfo.FromString(packed.value)
                case "google.rpc.BadRequest":
                    yield details_pb2.BadRequest.FromString(packed.value)
    except DecodeError:
        return  # unknown trailers: code and message are enough


def _field(details: Iterable[object], message: str) -> str | None:
    for detail in details:
        if isinstance(detail, details_pb2.BadRequest) and detail.field_violations:
            return detail.field_violations[0].field
    match = _FIELD.match(message)
    return match.group(1) if match else None


def _request_id(details: Iterable[object]) -> str | None:
    for detail in details:
        if isinstance(detail, details_pb2.RequestInfo):
            return detail.request_id
    return None


def _retry_after_s(details: Iterable[object]) -> float | None:
    for detail in details:
        if isinstance(detail, details_pb2.RetryInfo):
            return float(detail.retry_delay.ToTimedelta().total_seconds())
    return None
