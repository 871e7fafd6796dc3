"""Parses a body, and says what is wrong with it: the first wrong field, by its path in the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from core.errors import InvalidRequest

MAX_SHOWN_CHARS = 60
"""Longest part of a wrong value that a refusal shows, in characters."""
ALTERNATIVES = frozenset({"str", "NamedTool", "ResponsesChoice"})
"""pydantic's names for the alternatives of fields with several types."""

AnyBody = TypeVar("AnyBody", bound=BaseModel)


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
