"""Everything that can go wrong, and what a client is told about it.

    OutriderError
    ├── RequestError                 the caller's doing; nothing else is affected
    │   ├── InvalidRequest           INVALID_ARGUMENT    names the field and what is allowed
    │   ├── UnknownModel             NOT_FOUND           lists the models that are served
    │   ├── UnknownService           NOT_FOUND           of Health
    │   ├── Unauthenticated          UNAUTHENTICATED
    │   ├── Overloaded               RESOURCE_EXHAUSTED  says when to try again
    │   ├── RequestCancelled         CANCELLED
    │   └── DeadlinePassed           DEADLINE_EXCEEDED
    ├── ServiceError                 ours; the request may be repeated
    │   ├── Unavailable              UNAVAILABLE         no worker can take the session
    │   └── WorkerLost               UNAVAILABLE         an engine died, hung or answered nonsense
    │       └── WorkerStopping       UNAVAILABLE         an engine is to stop, and is left in good time
    ├── UnsoundScores                FAILED_PRECONDITION the model gives NaN or infinity; repeating it gives it again
    └── StartupError                 FAILED_PRECONDITION refuses to start, in one clear line
        ├── ConfigError              a setting is wrong
        ├── CheckpointError          missing, not safetensors, or incomplete
        ├── UnsupportedModel         the architecture has no attention seam
        └── VocabularyMismatch       draft and target do not share a vocabulary

`status` is the name of a gRPC status code; `deploy` turns it into one, so that this module need not know gRPC.
"""

from __future__ import annotations

from typing import ClassVar

MAX_CAUSE_CHARS = 300


class OutriderError(Exception):
    """Base of all errors that are raised on purpose; `str()` of one is fit for a client to read."""

    status: ClassVar[str] = "INTERNAL"


class RequestError(OutriderError):
    """The request cannot be served as it is; the service is fine."""


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
    """Prompt, or prompt and output, have more tokens than the model's context has room for."""


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = "NOT_FOUND"


class UnknownService(RequestError):
    """Health is asked about a service that does not exist."""

    status = "NOT_FOUND"


class Unauthenticated(RequestError):
    """The request carries no valid bearer token."""

    status = "UNAUTHENTICATED"


class Overloaded(RequestError):
    """There is no room for another session; refused before any model work."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class RequestCancelled(RequestError):
    """The client went away or asked to stop."""

    status = "CANCELLED"


class DeadlinePassed(RequestError):
    """The request's time ran out."""

    status = "DEADLINE_EXCEEDED"


class ServiceError(OutriderError):
    """The service failed the request; repeating it may succeed."""

    status = "UNAVAILABLE"


class Unavailable(ServiceError):
    """No worker can take the session now."""


class WorkerLost(ServiceError):
    """An engine died, does not answer, or answered something that cannot be right."""


class WorkerStopping(WorkerLost):
    """An engine is about to stop: its sessions move as if it had died, but that is no failure."""


class UnsoundScores(OutriderError):
    """The model gives no distribution for this sequence, so no token can be sampled from it.

    Not a ServiceError: clients repeat those, and the same tokens would lead to the same scores.
    """

    status = "FAILED_PRECONDITION"


class StartupError(OutriderError):
    """The service refuses to start; the message is one line and says what to change."""

    status = "FAILED_PRECONDITION"


class ConfigError(StartupError, ValueError):
    """A setting is unknown, of the wrong type, or out of range.

    A ValueError too, so that pydantic reports the path of the setting in its file.
    """


class CheckpointError(StartupError):
    """A checkpoint is missing, is not safetensors, or lacks a file."""


class UnsupportedModel(StartupError):
    """The architecture cannot be run by the runtime; the message gives the reason."""


class VocabularyMismatch(StartupError):
    """Draft and target disagree about a token id; the message gives the first difference."""


def first_line(error: BaseException) -> str:
    """The message of a library's error, shortened to what fits into one of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def cause(error: BaseException) -> str:
    """A library's error as the reason in one of ours: its type, since KeyError's message is a name, and its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_CAUSE_CHARS]}"
