"""The grammar of an output that has to be calls of tools, in a model's own format.

Pure functions. Knows tools' names and schemas; must not know which API they came by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHITESPACE = {"x-guidance": {"whitespace_pattern": " ?", "lenient": False}}
"""Between the parts of JSON: none, or a space."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written: `before` each, the key of its arguments, `after` each; around all, and between."""

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
"""By the names of the setting."""


def has_marks(form: str) -> bool:
    """Whether calls begin with something that no JSON begins with."""
    return bool(FORMS[form].begin or FORMS[form].before)


def grammar_of_calls(
    form: str, tools: Mapping[str, Mapping[str, Any]], *, is_one: bool = False, answer: Mapping[str, Any] | None = None
) -> str:
    """In Lark: one call of one of `tools` or, unless `is_one`, several; or, where it is given, JSON like `answer`.

    `tools` has the schema of each one's arguments, by its name.
    An answer may be given where calls have marks: the lexer takes the longest word, and never goes back.
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
    """A document of its own, so that its references to itself hold."""
    return f"%json {json.dumps({**schema, **WHITESPACE})}"
