"""All errors that Outrider raises, and the status that a client receives.

    OutriderError
    ├── RequestError                 the caller's fault; other requests are not affected
    │   ├── InvalidRequest           INVALID_ARGUMENT    names the field and what is allowed
    │   ├── UnknownModel             NOT_FOUND           lists the models that are served
    │   ├── UnknownService           NOT_FOUND           raised by Health
    │   ├── Unauthenticated          UNAUTHENTICATED
    │   ├── Overloaded               RESOURCE_EXHAUSTED  says when to try again
    │   ├── RequestCancelled         CANCELLED
    │   └── DeadlinePassed           DEADLINE_EXCEEDED
    ├── ServiceError                 the service's fault; a retry may succeed
    │   ├── Unavailable              UNAVAILABLE         no worker can take the session
    │   └── WorkerLost               UNAVAILABLE         an engine died, hung or sent an invalid reply
    │       └── WorkerStopping       UNAVAILABLE         an engine will stop soon; sessions leave it
    ├── UnsoundScores                FAILED_PRECONDITION the model returns NaN or infinity; a retry fails again
    └── StartupError                 FAILED_PRECONDITION the service does not start; one line says why
        ├── ConfigError              a setting is wrong
        ├── CheckpointError          missing, not safetensors, or incomplete
        ├── UnsupportedModel         the architecture has no attention seam
        └── VocabularyMismatch       draft and target do not share a vocabulary

`status` is the name of a gRPC status code. `deploy` converts it, so this module does not depend on gRPC.
"""

from __future__ import annotations

from typing import ClassVar

MAX_CAUSE_CHARS = 300


class OutriderError(Exception):
    """Base of all errors that are raised on purpose; `str(error)` is safe to show to a client."""

    status: ClassVar[str] = "INTERNAL"


class RequestError(OutriderError):
    """The request is at fault, not the service."""


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str]]:
        return type(self), (self.field, self.problem)


class ContextExceeded(InvalidRequest):
    """The prompt, or prompt plus output, has more tokens than fit in the model's context."""


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = "NOT_FOUND"


class UnknownService(RequestError):
    """A health check names a service that does not exist."""

    status = "NOT_FOUND"


class Unauthenticated(RequestError):
    """The request carries no valid bearer token."""

    status = "UNAUTHENTICATED"


class Overloaded(RequestError):
    """There is no capacity for another session. Raised before any model work."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class RequestCancelled(RequestError):
    """The client disconnected or cancelled."""

    status = "CANCELLED"


class DeadlinePassed(RequestError):
    """The request's deadline passed."""

    status = "DEADLINE_EXCEEDED"


class ServiceError(OutriderError):
    """The service failed the request; repeating it may succeed."""

    status = "UNAVAILABLE"


class Unavailable(ServiceError):
    """No worker can take the session now."""


class WorkerLost(ServiceError):
    """An engine died, does not reply, or sent an invalid reply."""


class WorkerStopping(WorkerLost):
    """An engine is about to stop. Its sessions move as after a crash, but this is not counted as a failure."""


class UnsoundScores(OutriderError):
    """The model gives no valid distribution for this sequence, so no token can be sampled.

    Not a ServiceError: clients retry those, and the same tokens would give the same scores.
    """

    status = "FAILED_PRECONDITION"


class StartupError(OutriderError):
    """The service refuses to start. The message is one line and says what to change."""

    status = "FAILED_PRECONDITION"


class ConfigError(StartupError, ValueError):
    """A setting is unknown, has the wrong type, or is out of range.

    Also a ValueError, so that pydantic reports the path of the setting in its file.
    """


class CheckpointError(StartupError):
    """A checkpoint is missing, is not safetensors, or lacks a file."""


class UnsupportedModel(StartupError):
    """The runtime cannot run this architecture; the message gives the reason."""


class VocabularyMismatch(StartupError):
    """Draft and target disagree about a token id; the message gives the first difference."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, for quoting in one of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def cause(error: BaseException) -> str:
    """Return the type and message of a library's error, shortened. The type matters: a KeyError's message is only the
    key.
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_CAUSE_CHARS]}"
