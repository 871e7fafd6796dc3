"""Errors for gRPC clients: a status code, one readable line, and machine-readable details.

Knows the error tree and google.rpc; must not know which method failed. Clients never get a stack trace: an unexpected
error is logged with an id, and the client gets the id.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from core.errors import InvalidRequest, OutriderError, Overloaded
from deploy import calls
from deploy.api import message_of, shortened

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key of a serialized google.rpc.Status."""


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = ()

    def to_proto(self) -> status_pb2.Status:
        packed = []
        for detail in self.details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=packed)

    def to_trailers(self) -> list[tuple[str, str | bytes]]:
        """The status as trailing metadata, with the headers that identify the call."""
        call = calls.current()
        return [(DETAILS_KEY, self.to_proto().SerializeToString()), *(call.headers if call is not None else ())]


def status_of(error: Exception) -> Status:
    """The status of any error. An unexpected error is logged, and its status shows only the id of the log entry."""
    if not isinstance(error, OutriderError):
        return Status(grpc.StatusCode.INTERNAL, message_of(error), _request_info())
    return Status(grpc.StatusCode[error.status], message_of(error), (*_details(error), *_request_info()))


def _request_info() -> tuple[Message, ...]:
    call = calls.current()
    return () if call is None else (error_details_pb2.RequestInfo(request_id=call.request_id),)


def _details(error: OutriderError) -> tuple[Message, ...]:
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=shortened(error.problem))
        return (error_details_pb2.BadRequest(field_violations=[violation]),)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)
    return ()
