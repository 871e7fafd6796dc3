"""Errors of calls.

    OutriderError            any other status
    ├── InvalidRequest       INVALID_ARGUMENT                     `field` names the wrong field
    ├── NotFound             NOT_FOUND                            no such model, or nothing is served there
    ├── Unauthenticated      UNAUTHENTICATED, PERMISSION_DENIED
    ├── DeadlinePassed       DEADLINE_EXCEEDED                    the caller's time, over all attempts
    ├── Overloaded           RESOURCE_EXHAUSTED                   retried until retries or time run out
    ├── ServiceError         UNAVAILABLE, INTERNAL, ABORTED,      retried until retries or time run out
    │                        CANCELLED
    └── Inconsistent         DATA_LOSS                            a resumed stream does not continue the first

Knows status codes; must not know calls or retries. `outrider_client._statuses` converts gRPC's errors to these.
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class OutriderError(Exception):
    """A call failed: the code, the server's message, and the field of the request if the server named one."""

    is_transient: ClassVar[bool] = False
    """Whether the same call may succeed later."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(code, message, field, retry_after_s, request_id)  # all, so that the error can be pickled
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        """Seconds that the server asked the client to wait."""
        self.request_id = request_id
        """Name of the request in the server's logs; None if the error did not come from Outrider."""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidRequest(OutriderError):
    """A field has a value that is not allowed."""


class NotFound(OutriderError):
    """The server has no such model."""


class Unauthenticated(OutriderError):
    """The token is missing, invalid, or lacks the permission."""


class DeadlinePassed(OutriderError):
    """The caller's time ran out."""


class Overloaded(OutriderError):
    """The server cannot take another request now."""

    is_transient = True


class ServiceError(OutriderError):
    """The server or the connection to it failed."""

    is_transient = True


class Inconsistent(OutriderError):
    """The output does not continue the received part; the server may serve another model."""
