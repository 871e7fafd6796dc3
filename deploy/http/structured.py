"""What an output must look like, as bodies say it: OpenAI's way, and the ways of vLLM, which name the same.

Pure functions. Must not know which values are allowed: `deploy.api` does.
"""

from __future__ import annotations

from core.errors import InvalidRequest
from deploy.api import require
from deploy.http.bodies import Body, ResponseFormat
from workers.grammar import Structure

RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def structure_of(body: Body) -> tuple[str, Structure] | None:
    """Where in the body it is said, and what. Raises: InvalidRequest where it is said twice."""
    found = _response_format(body.response_format) + _structured_outputs(body) + _guided(body)
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"must not be given beside {found[0][0]}")
    return found[0] if found else None


def _response_format(given: ResponseFormat | None) -> list[tuple[str, Structure]]:
    if given is None:
        return []
    require(given.type in RESPONSE_FORMATS, "response_format.type", f"one of {', '.join(RESPONSE_FORMATS)}", given.type)
    if given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequest("response_format.json_schema", "must be given with this type")
        return [("response_format.json_schema.schema", Structure("json_schema", given.json_schema.schema_))]
    if given.json_schema is not None:
        raise InvalidRequest("response_format.json_schema", "must not be given unless type is json_schema")
    return [("response_format", Structure("json_object", True))] if given.type == "json_object" else []


def _structured_outputs(body: Body) -> list[tuple[str, Structure]]:
    given = body.structured_outputs
    if given is None:
        return []
    values = {
        "json": ("json_schema", given.json_),
        "json_object": ("json_object", given.json_object or None),
        "regex": ("regex", given.regex),
        "choice": ("choice", given.choice),
        "grammar": ("grammar", given.grammar),
    }
    return [
        (f"structured_outputs.{name}", Structure(kind, value))
        for name, (kind, value) in values.items()
        if value is not None
    ]


def _guided(body: Body) -> list[tuple[str, Structure]]:
    values = {
        "guided_json": ("json_schema", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice),
        "guided_grammar": ("grammar", body.guided_grammar),
    }
    return [(name, Structure(kind, value)) for name, (kind, value) in values.items() if value is not None]
