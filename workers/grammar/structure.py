"""Turns a request's structured-output field into a grammar, and compiles it so that a bad one is refused early.

It compiles for a vocabulary of bytes, so the check of requests needs no model's tokenizer. Every refusal names the
field by its path in the proto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from core.config import Limits
from core.errors import InvalidRequest
from core.ranges import shown
from core.records import Grammar, GrammarKind
from workers.grammar.cache import Grammars
from workers.grammar.compiler import GrammarCompiler, GrammarProblem
from workers.grammar.schemas import rewrite_schema

FIELD = "structured_output"
TEMPLATE_FIELD = "speculation.template"
STRUCTURES = ("json_schema", "json_object", "regex", "choice", "grammar")
"""Kinds of structure, as the proto names them."""
EMBEDDED = re.compile(r"%json\s*(?=\{)")
"""Introduces a JSON schema in a Lark grammar."""
MAX_GROWTH = 4
"""Limit on a grammar's text after its schemas are rewritten, as a multiple of `max_grammar_bytes`."""
MAX_KEPT = 64
"""Number of grammars cached."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A structured-output field of a request: its kind, from STRUCTURES, and its value."""

    kind: str
    value: Any
    """json_schema: a string or a mapping. choice: strings. json_object: a boolean. Other kinds: a string."""

    @property
    def field(self) -> str:
        return f"{FIELD}.{self.kind}"


def grammar_of(structure: Structure, limits: Limits, *, closes_schemas: bool = True) -> Grammar:
    """Build the grammar and check that it compiles. Takes about a millisecond, at worst a second.

    `closes_schemas`: see `ServiceConfig`. Raises: InvalidRequest.
    """
    _require_served(FIELD, limits)
    return _checked(_followed(_written(structure, limits), structure.field, limits, closes_schemas), structure.field)


def template_of(expression: str, limits: Limits) -> Grammar:
    """Build the grammar of the usual output from a regular expression, as `grammar_of`. Raises: InvalidRequest."""
    _require_served(TEMPLATE_FIELD, limits)
    return _checked(Grammar(GrammarKind.REGEX, _bounded(expression, TEMPLATE_FIELD, limits)), TEMPLATE_FIELD)


def _require_served(field: str, limits: Limits) -> None:
    if limits.max_grammar_bytes == 0:
        raise InvalidRequest(field, "is not served here: the service is set to refuse it")


def _checked(grammar: Grammar, field: str) -> Grammar:
    with _named(field):
        _compiled().compile(grammar)
    return grammar


@contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except GrammarProblem as problem:
        raise InvalidRequest(field, f"cannot be followed: {problem}") from None
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None


def _followed(grammar: Grammar, field: str, limits: Limits, closes: bool) -> Grammar:
    """Rewrite each JSON schema in a grammar so that the library follows it exactly."""
    with _named(field):
        text = _text_followed(grammar, closes)
    if len(text) > MAX_GROWTH * limits.max_grammar_bytes:
        raise InvalidRequest(field, "has schemas that many properties share: give them once, by $ref")
    return Grammar(grammar.kind, text)


@lru_cache(MAX_KEPT)
def _text_followed(grammar: Grammar, closes: bool) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return json.dumps(rewrite_schema(json.loads(grammar.text), closes=closes))
        case GrammarKind.LARK:
            return _with_schemas_followed(grammar.text, closes)
    return grammar.text


def _with_schemas_followed(text: str, closes: bool) -> str:
    """Rewrite the schemas in a Lark grammar. Invalid JSON stays, for the library to refuse."""
    parts, end = [], 0
    for mark in EMBEDDED.finditer(text):
        try:
            schema, after = json.JSONDecoder().raw_decode(text, mark.end())
        except ValueError:
            continue
        if isinstance(schema, dict) and mark.start() >= end:
            parts += [text[end : mark.end()], json.dumps(rewrite_schema(schema, closes=closes))]
            end = after
    return "".join([*parts, text[end:]])


@cache
def _compiled() -> Grammars:
    return Grammars(GrammarCompiler.of_bytes, GrammarCompiler.of_bytes().vocab_size, MAX_KEPT)


def _written(structure: Structure, limits: Limits) -> Grammar:
    match structure.kind:
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, _schema(structure, limits))
        case "json_object":
            if structure.value is not True:
                raise InvalidRequest(structure.field, "must be true where it is given")
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object"}))
        case "choice":
            return Grammar(GrammarKind.REGEX, _alternatives(structure, limits))
        case "regex":
            return Grammar(GrammarKind.REGEX, _bounded(structure.value, structure.field, limits))
    return Grammar(GrammarKind.LARK, _bounded(structure.value, structure.field, limits))


def _schema(structure: Structure, limits: Limits) -> str:
    """The schema as JSON, serialized anew: text pasted into a grammar must be exactly one value."""
    value = structure.value
    try:
        if isinstance(value, str):
            value = json.loads(_bounded(value, structure.field, limits))
        text = json.dumps(value, allow_nan=False)
    except RecursionError:
        raise InvalidRequest(structure.field, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(structure.field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(structure.field, f"must be a JSON object, got {shown(text)}")
    return _bounded(text, structure.field, limits)


def _alternatives(structure: Structure, limits: Limits) -> str:
    choices: Sequence[str] = structure.value
    if not choices:
        raise InvalidRequest(structure.field, "must hold at least one text")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequest(f"{structure.field}[{index}]", "must not be empty")
    _bounded("".join(choices), structure.field, limits)
    return "|".join(map(re.escape, choices))


def _bounded(text: str, field: str, limits: Limits) -> str:
    most, size = limits.max_grammar_bytes, len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise InvalidRequest(field, f"must be at most {most} bytes long, got {size}")
    if not text:
        raise InvalidRequest(field, "must not be empty")
    return text
