"""Tools that a body gives, whichever API it is of: checked, and as chat templates have them.

Pure functions. Knows names and schemas; must not know bodies or models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from deploy.api import require
from deploy.http.output import Formats, Tool
from orchestrator.text import Tokenizer

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
AUTO, REQUIRED, NAMED = "auto", "required", "named"
NO_CALLS = "none"


@dataclass(frozen=True, slots=True)
class GivenTool:
    """One tool of a body, and where it stands."""

    field: str
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of its arguments; None takes any object."""


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What a model may call, or must."""

    tools: tuple[Tool, ...]
    shown: tuple[Mapping[str, Any], ...]
    """All of them, as chat templates have them."""
    is_forced: bool = False
    """The output has to be calls of `tools`."""
    is_one: bool = False
    """There may be one call at most."""


def asked_tools(
    given: Sequence[GivenTool], choice: str, name: str | None = None, *, is_one: bool = False, name_field: str
) -> AskedTools | None:
    """What may be called by `choice`: none, auto, required or named, by its `name`; None where nothing may be.

    Raises: InvalidRequest.
    """
    for index, tool in enumerate(given):
        is_fit = NAME.fullmatch(tool.name) is not None
        require(is_fit, f"{tool.field}.name", "1 to 128 letters, digits, '_', '-' or '.'", tool.name)
        is_new = tool.name not in {other.name for other in given[:index]}
        require(is_new, f"{tool.field}.name", "another name than those before", tool.name)
    if choice in (REQUIRED, NAMED) and not given:
        raise InvalidRequest("tool_choice", "must not ask for a call where no tools are given")
    if choice == NO_CALLS or not given:
        return None
    tools = [Tool(tool.name, tool.parameters or {}) for tool in given if choice != NAMED or tool.name == name]
    require(bool(tools), name_field, "the name of one of the tools", name)
    is_forced = choice in (REQUIRED, NAMED)
    return AskedTools(tuple(tools), tuple(map(_shown, given)), is_forced, is_one or choice == NAMED)


def _shown(tool: GivenTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": {**(tool.parameters or {})}}
    return {"type": "function", "function": function}


def require_calls(formats: Formats, tokenizer: Tokenizer) -> str:
    """The format of the model's calls. Raises: InvalidRequest where it has none, or none that is known here."""
    if "tools" not in (tokenizer.template or ""):
        raise InvalidRequest("tools", "must not be given: this model's chat template takes no tools")
    if formats.calls is None:
        problem = "must not be given: how this model writes calls is not known here (the setting http.tool_call_parser)"
        raise InvalidRequest("tools", problem)
    return formats.calls


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call that the model has made, as chat templates have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {**arguments}}}


def arguments_of(text: str, field: str) -> dict[str, Any]:
    """Of a call that comes back. Raises: InvalidRequest where it is no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object, written as a string")
    return value
