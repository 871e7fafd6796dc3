"""Errors for HTTP clients: a status, and an object with the problem and the field, the first wrong one of a body.

Knows the error tree, and the form of errors in each API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from core.errors import (
    ContextExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    RequestError,
    Unauthenticated,
    UnknownModel,
)
from deploy import calls
from deploy.api import message_of
from deploy.http.wire import JSON, Head, Headers, encoded, event, whole

MAX_SHOWN_CHARS = 60
"""Longest part of a wrong value that a refusal shows, in characters."""
ALTERNATIVES = frozenset({"str", "NamedTool", "ResponsesChoice"})
"""pydantic's names for the alternatives of fields with several types."""

AnyBody = TypeVar("AnyBody", bound=BaseModel)
STATUSES: Mapping[str, int] = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    # Clients retry on 500 and above, but the same tokens would give the same unsound scores.
    "FAILED_PRECONDITION": HTTPStatus.UNPROCESSABLE_ENTITY,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,  # a full queue, a quota
    "CANCELLED": 499,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}
"""HTTP status by gRPC code; other codes map to 500."""
TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"
"""Prefix of the paths of Anthropic's API."""
CODES: Mapping[type[Exception], str] = {
    ContextExceeded: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthenticated: "invalid_api_key",
    Overloaded: "rate_limit_exceeded",
}


class UnknownPath(RequestError):
    status = "NOT_FOUND"


class WrongMethod(RequestError):
    status = "UNIMPLEMENTED"

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"this path takes {allowed}, got {method}")
        self.allowed = allowed


class BodyTooLong(InvalidRequest):
    def __init__(self, most: int) -> None:
        super().__init__("body", f"must be at most {most} bytes long")


class BodyEncoded(InvalidRequest):
    def __init__(self, encoding: str) -> None:
        super().__init__("content-encoding", f"must not be given: send the body as it is, got {encoding[:40]!r}")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure in the form of the called API."""

    head: Head
    body: bytes
    event: bytes
    """The event that ends a stream which has begun."""
    message: str
    """The problem as plain text."""


def failure_of(error: Exception, path: str = "") -> Failure:
    """The failure for any error. An unexpected error is logged, and the client gets only the id of the log entry."""
    status, message = _status(error), message_of(error)
    is_anthropic = path.startswith(MESSAGES)
    body = encoded(_by_anthropic(status, message) if is_anthropic else _by_openai(error, status, message))
    head, body = whole(body, status, (*JSON, *_headers(error)))
    return Failure(head, body, event(body, "error" if is_anthropic else ""), message)


def _by_openai(error: Exception, status: int, message: str) -> dict[str, Any]:
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = TYPES.get(status) or ("server_error" if is_ours else "invalid_request_error")
    param = error.field if isinstance(error, InvalidRequest) else "model" if isinstance(error, UnknownModel) else None
    content = {"message": message, "type": kind, "param": param, "code": CODES.get(type(error))}
    return {"error": {**content, **_named()}}


def _by_anthropic(status: int, message: str) -> dict[str, Any]:
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = ANTHROPIC_TYPES.get(status) or ("api_error" if is_ours else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, **_named()}


def _named() -> dict[str, Any]:
    call = calls.current()
    return {} if call is None else {"request_id": call.request_id}


def code_of(error: Exception) -> str:
    """Name of the gRPC status code, used in logs and metrics of both APIs."""
    return error.status if isinstance(error, OutriderError) else OutriderError.status


def _status(error: Exception) -> int:
    if isinstance(error, BodyTooLong):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    if isinstance(error, BodyEncoded):
        return HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    if isinstance(error, WrongMethod):
        return HTTPStatus.METHOD_NOT_ALLOWED
    if isinstance(error, OutriderError):
        return STATUSES.get(error.status, HTTPStatus.INTERNAL_SERVER_ERROR)
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _headers(error: Exception) -> Headers:
    if isinstance(error, Overloaded):
        # The standard header has whole seconds. The openai client prefers the one in milliseconds.
        delay_s = error.retry_after_s
        return (("retry-after", str(ceil(delay_s))), ("retry-after-ms", str(ceil(1000 * delay_s))))
    if isinstance(error, Unauthenticated):
        return (("www-authenticate", "Bearer"),)
    if isinstance(error, WrongMethod):
        return (("allow", error.allowed),)
    return ()


# Parsing


def parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Parse a body. Raises: InvalidRequest, which names the first wrong field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of(error) from None


def refusal_of(error: ValidationError, field: str = "") -> InvalidRequest:
    """The first problem, with its path below `field`."""
    errors: list[Mapping[str, Any]] = [*error.errors(include_url=False)]
    places = [tuple(part for part in each["loc"] if not _is_of_union(part)) for each in errors]
    # A field may have several types. The alternative that fails deepest is the one the caller meant.
    below_first = [index for index, place in enumerate(places) if place[: len(places[0])] == places[0]]
    index = max(below_first, key=lambda index: len(places[index]))
    first, path = errors[index], path_of(places[index])
    below = path if not field or path.startswith("[") or not path else f".{path}"
    return InvalidRequest(field + below or "body", _problem(first))


def _is_of_union(part: str | int) -> bool:
    """Whether this part of an error's location is the name of a union's alternative, not a path in the body."""
    return isinstance(part, str) and (part in ALTERNATIVES or "[" in part)


def path_of(location: tuple[str | int, ...]) -> str:
    """A location as callers read it: messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _problem(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "missing":
            return "must be given"
        case "extra_forbidden":
            return "is not a field that this server knows"
        case "json_invalid":
            return f"is not JSON: {error['ctx']['error']}"
        case "value_error":
            return str(error["ctx"]["error"])
    shown = repr(error["input"])
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return f"{error['msg'].replace('Input should be', 'must be')}, got {shown}"
