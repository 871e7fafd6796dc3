"""Checks the tools in a body of any API, and converts them for chat templates.

Pure functions. Knows names and schemas; must not know bodies or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from deploy.api import GivenTool, check_tools, require
from orchestrator.text import Tokenizer

AUTO, REQUIRED, NAMED = "auto", "required", "named"
NO_CALLS = "none"


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools that a model may or must call."""

    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schema of the arguments of each callable tool, by name."""
    fields: Mapping[str, str]
    """Path in the body of each callable tool's schema, by name."""
    shown: tuple[Mapping[str, Any], ...]
    """All tools, in the form that chat templates expect."""
    is_forced: bool = False
    """Whether the output must be calls of these tools."""
    is_one: bool = False
    """Whether at most one call is allowed."""


def asked_tools(
    given: Sequence[GivenTool], choice: str, name: str | None = None, *, is_one: bool = False, name_field: str
) -> AskedTools | None:
    """The tools allowed by `choice`: none, auto, required or named, with `name`. None if no tool may be called.

    Raises: InvalidRequest.
    """
    check_tools(given)
    if choice in (REQUIRED, NAMED) and not given:
        raise InvalidRequest("tool_choice", "must not ask for a call where no tools are given")
    if choice == NO_CALLS or not given:
        return None
    callable_ones = [tool for tool in given if choice != NAMED or tool.name == name]
    require(bool(callable_ones), name_field, "the name of one of the tools", name)
    return AskedTools(
        schemas={tool.name: tool.parameters or {} for tool in callable_ones},
        fields={tool.name: f"{tool.field}.{tool.schema_name}" for tool in callable_ones},
        shown=tuple(tool.for_template for tool in given),
        is_forced=choice in (REQUIRED, NAMED),
        is_one=is_one or choice == NAMED,
    )


def require_calls(form: str | None, tokenizer: Tokenizer) -> str:
    """The format of the model's calls. Raises: InvalidRequest if it has none, or an unknown one."""
    if "tools" not in (tokenizer.template or ""):
        raise InvalidRequest("tools", "must not be given: this model's chat template takes no tools")
    if form is None:
        problem = "must not be given: how this model writes calls is not known here (the setting http.tool_call_parser)"
        raise InvalidRequest("tools", problem)
    return form
