"""Builds the grammar of an output that must be tool calls, in a model's own format.

Pure functions. Knows tools' names and schemas; must not know the API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHITESPACE = {"x-guidance": {"whitespace_pattern": " ?", "lenient": False}}
"""White space between JSON tokens: none, or one space."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Format of a model's calls: `begin` and `end` around all, `before` and `after` around each, `between` two of them.

    `key` is the name of the arguments.
    """

    begin: str
    before: str
    key: str
    after: str
    between: str
    end: str


FORMS: Mapping[str, _Form] = {
    "hermes": _Form("", "<tool_call>\n", "arguments", "\n</tool_call>", "\n", ""),
    "llama3_json": _Form("", "", "parameters", "", "; ", ""),
    "mistral": _Form("[TOOL_CALLS][", "", "arguments", "", ", ", "]"),
}
"""Formats by the values of the setting."""


def has_marks(form: str) -> bool:
    """Whether calls begin with text that cannot begin a JSON value."""
    return bool(FORMS[form].begin or FORMS[form].before)


def grammar_of_calls(
    form: str, tools: Mapping[str, Mapping[str, Any]], *, is_one: bool = False, answer: Mapping[str, Any] | None = None
) -> str:
    """Lark grammar of one call of `tools`, or of several unless `is_one`; or of JSON that matches `answer`, if given.

    `tools` maps names to the schemas of their arguments. `answer` requires calls with marks, because the lexer takes
    the longest match and never backtracks.
    """
    how = FORMS[form]
    names = [f"call_{index}" for index in range(len(tools))]
    calls = " ".join(filter(None, (_literal(how.begin), "call", "" if is_one else _more(how), _literal(how.end))))
    lines = [
        f"start: calls{' | answer' if answer is not None else ''}",
        f"calls: {calls}",
        f"call: {' | '.join(names)}",
        *(f"{name}: {_call(how, *tool)}" for name, tool in zip(names, tools.items(), strict=True)),
        *(f"answer: {_json(each)}" for each in [answer] if each is not None),
    ]
    return "\n".join(lines)


def _more(how: _Form) -> str:
    return f"({_literal(how.between)} call)*"


def _call(how: _Form, name: str, parameters: Mapping[str, Any]) -> str:
    begin = f'{how.before}{{"name": {json.dumps(name)}, "{how.key}": '
    return f"{_literal(begin)} {_json({'type': 'object', **parameters})} {_literal('}' + how.after)}"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    """The schema as a JSON document of its own, so that its internal references resolve."""
    return f"%json {json.dumps({**schema, **WHITESPACE})}"
