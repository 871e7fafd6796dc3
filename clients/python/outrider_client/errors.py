"""What can go wrong with a call.

    OutriderError            any other status
    ├── InvalidRequest       INVALID_ARGUMENT                     `field` names what is wrong
    ├── NotFound             NOT_FOUND                            no such model, or nothing is served there
    ├── Unauthenticated      UNAUTHENTICATED, PERMISSION_DENIED
    ├── DeadlinePassed       DEADLINE_EXCEEDED                    the caller's time, over all attempts
    ├── Overloaded           RESOURCE_EXHAUSTED                   tried again, until retries or time ran out
    ├── ServiceError         UNAVAILABLE, INTERNAL, ABORTED,      tried again, until retries or time ran out
    │                        CANCELLED
    └── Inconsistent         DATA_LOSS                            a resumed stream does not continue the first

Knows status codes; must not know calls or retries (`outrider_client._statuses` makes these from what gRPC raises).
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class OutriderError(Exception):
    """A call failed: the code, the server's message, and the field of the request if the server named one."""

    is_transient: ClassVar[bool] = False
    """Whether the same call may succeed a little later."""

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
        """Seconds that the server asked to wait."""
        self.request_id = request_id
        """The id of the call in the server's logs; None where no server of ours has answered."""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidRequest(OutriderError):
    """A field has a value that is not allowed."""


class NotFound(OutriderError):
    """There is no such model here."""


class Unauthenticated(OutriderError):
    """The token is missing, wrong, or not good for this."""


class DeadlinePassed(OutriderError):
    """The caller's time ran out."""


class Overloaded(OutriderError):
    """There is no room for another request now."""

    is_transient = True


class ServiceError(OutriderError):
    """The server, or the way to it, failed."""

    is_transient = True


class Inconsistent(OutriderError):
    """A server's output does not continue the received part: it may serve another model."""
