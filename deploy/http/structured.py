"""The required structure of an output, from the API's own field, vLLM's fields, and forced tool calls.

Pure functions. Must not know which values are allowed: `deploy.api` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from core.config import ServiceConfig
from core.errors import InvalidRequest
from deploy.http.bodies import Body, StructuredOutputs
from deploy.http.output import grammar_of_calls, has_marks
from deploy.http.tools import AskedTools
from workers.grammar import Structure, grammar_of

Held = tuple[str, Structure]
"""The field of the body, and the structure that it requires."""


def structure_of(body: Body, asked: AskedTools | None = None) -> Held | None:
    """The structure that the body requires of its output. Raises: InvalidRequest if it gives several.

    The API's own format describes an answer, so it is ignored if a tool call is forced.
    """
    own = body.format_asked
    found = ([] if own is None or (asked is not None and asked.is_forced) else [own]) + _by_vllm(body)
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"must not be given beside {found[0][0]}")
    return found[0] if found else None


def held_to(body: Body, asked: AskedTools | None, calls: str | None) -> Held | None:
    """The required structure, forced tool calls included; `calls` is their format. Raises: InvalidRequest."""
    said = structure_of(body, asked)
    if asked is None or calls is None or (said is None and not asked.is_forced):
        return said
    if said is not None and asked.is_forced:
        raise InvalidRequest("tool_choice", f"must not ask for a call beside {said[0]}")
    if said is not None and not has_marks(calls):
        raise InvalidRequest(said[0], "must not be given beside tools here: this model's calls are JSON, too")
    answer = _schema(*said) if said is not None else None
    grammar = grammar_of_calls(calls, asked.schemas, is_one=asked.is_one, answer=answer)
    return (said[0] if said is not None else "tools", Structure("grammar", grammar))


def refusal_of_tool(asked: AskedTools, calls: str, config: ServiceConfig) -> InvalidRequest | None:
    """The error of the first tool whose schema fails on its own, or None. Called if the grammar of all tools fails."""
    for name, schema in asked.schemas.items():
        try:
            structure = Structure("grammar", grammar_of_calls(calls, {name: schema}, is_one=True))
            grammar_of(structure, config.limits, closes_schemas=config.close_schemas)
        except InvalidRequest as error:
            return InvalidRequest(asked.fields[name], error.problem)
    return None


def _schema(field: str, structure: Structure) -> Mapping[str, Any]:
    """JSON schema of an answer that may come instead of calls."""
    value = structure.value
    if structure.kind == "json_object":
        return {"type": "object"}
    if structure.kind == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest(field, "is not JSON") from None
    if structure.kind != "json_schema" or not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON schema beside tools, or tool_choice none")
    return value


def _by_vllm(body: Body) -> list[Held]:
    """Structures from vLLM's current field, and from its earlier ones."""
    given = body.structured_outputs or StructuredOutputs()
    values = {
        "structured_outputs.json": ("json_schema", given.json_),
        "structured_outputs.json_object": ("json_object", given.json_object or None),
        "structured_outputs.regex": ("regex", given.regex),
        "structured_outputs.choice": ("choice", given.choice),
        "structured_outputs.grammar": ("grammar", given.grammar),
        "guided_json": ("json_schema", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice),
        "guided_grammar": ("grammar", body.guided_grammar),
    }
    return [(field, Structure(kind, value)) for field, (kind, value) in values.items() if value is not None]
