"""Rewrites a JSON schema so that the library follows it exactly, or refuses it.

Pure, except that it compiles grammars to test whether patterns match. Knows JSON schema and the gaps of the library
(llguidance 1.9.1); must not know requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from core.ranges import shown
from core.records import Grammar, GrammarKind
from workers.grammar.compiler import GrammarCompiler, GrammarProblem
from workers.grammar.openness import ids_to_leave_open, nodes_of, subschemas

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
"""Formats that the library enforces. All others are annotations, as JSON schema defines them."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
}
"""Keywords that the library does not know, with the values that make them no constraint."""
MAX_PATTERNS = 100
"""Limit on a schema's patterns. 100 compile in 0.03 s; the library compares all pairs, so that 400 take 34 s."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
BOUNDS = ("minimum", "maximum", "multipleOf")
OPEN_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum")
"""The library subtracts 1 from these as a double."""
EXACT = 2**53
"""A double represents every integer up to this."""


def rewrite_schema(schema: Mapping[str, Any], *, closes: bool) -> dict[str, Any]:
    """Rewrite a schema for compilation.

    `closes`: forbid unlisted properties in an object that lists properties and does not say whether it has others.
    Raises: GrammarProblem, which names the place in the schema.
    """
    patterns = (node.get("patternProperties") for node in nodes_of(schema))
    num_patterns = sum(len(each) for each in patterns if isinstance(each, dict))
    if num_patterns > MAX_PATTERNS:
        raise GrammarProblem(f"patternProperties may have at most {MAX_PATTERNS} patterns together, got {num_patterns}")
    rewritten = _rewrite(schema, "", ids_to_leave_open(schema) if closes else None)
    assert isinstance(rewritten, dict), "an object stays one"
    return rewritten


def _rewrite(schema: Any, path: str, open_ids: frozenset[int] | None) -> Any:
    """Rewrite everything below `path`. `open_ids`: ids of the schemas to leave open; None for all."""
    if not isinstance(schema, dict):
        return schema
    _check_numbers(schema, path)
    result = {name: value for name, value in schema.items() if not _is_neutral(name, value)}
    for name, key, below in subschemas(result):
        place = ".".join(filter(None, (path, name, "" if key is None else str(key))))
        value = _rewrite(below, place, open_ids)
        if key is None:
            result[name] = value
        else:
            if result[name] is schema[name]:
                result[name] = result[name].copy()
            result[name][key] = value
    if open_ids is not None and id(schema) not in open_ids:
        result["additionalProperties"] = False
    _check_keys(result, path)
    return _move_listed_patterns(result)


def _is_neutral(name: str, value: Any) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    if name == "propertyNames":  # zod writes it for each record
        key_schema = {} if value is True else value
        is_type = isinstance(key_schema, dict) and key_schema.get("type", "string") == "string"
        return is_type and not {*key_schema} - {"type"} - ANNOTATIONS
    return any(value == each and type(value) is type(each) for each in NEUTRAL.get(name, ()))


def _check_numbers(schema: Mapping[str, Any], path: str) -> None:
    """Raises: GrammarProblem for a number that the library, which reads doubles, would misread."""
    for name in (*BOUNDS, *OPEN_BOUNDS):
        value = schema.get(name)
        if _is_inexact(value) or (name in OPEN_BOUNDS and _is_large(value)):
            _refuse_number(f"{path}.{name}", value)
    for name in ("const", "enum"):
        for value in _numbers(schema.get(name)):
            if _is_inexact(value):
                _refuse_number(f"{path}.{name}", value)


def _refuse_number(path: str, value: Any) -> None:
    raise GrammarProblem(
        f"{path.removeprefix('.')} cannot be held to exactly, since it is an integer beyond 2^53: ask for a string, "
        f"got {shown(value)[:40]}"
    )


def _numbers(value: Any) -> Iterator[int]:
    """All integers in a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int):
        yield value


def _is_large(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > EXACT


def _is_inexact(value: Any) -> bool:
    """Whether this is an integer that no double represents."""
    if not isinstance(value, int) or abs(value) <= EXACT:
        return False
    try:
        return int(float(value)) != value
    except OverflowError:
        return True


def _check_keys(schema: Mapping[str, Any], path: str) -> None:
    """Raises: GrammarProblem if repeated keys could satisfy minProperties: a grammar tracks only the listed keys."""
    least, listed = schema.get("minProperties"), schema.get("properties")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not isinstance(least, int) or is_closed:
        return
    num_listed = len(_names(schema.get("required")) & {*(listed if isinstance(listed, dict) else {})})
    if least > num_listed + 1:
        place = f"{path}.minProperties".removeprefix(".")
        raise GrammarProblem(
            f"{place} is held to up to one more than the listed properties that are required ({num_listed + 1}), "
            f"since keys that are not listed may repeat, got {least}"
        )


def _names(value: Any) -> set[str]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _move_listed_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Move patterns that only listed properties can match to those properties.

    Otherwise the library would allow one more property after the listed ones, find no key for it, and stop in the
    middle of an output that could have been complete.
    """
    listed, patterns = schema.get("properties"), schema.get("patternProperties")
    if not (isinstance(listed, dict) and isinstance(patterns, dict) and listed and patterns):
        return schema
    if schema.get("additionalProperties") is not False or _has_other_key([*listed], [*patterns]):
        return schema
    held = {name: [value] for name, value in listed.items()}
    for pattern, also in patterns.items():
        for name in _matching(pattern, listed):
            held[name].append(also)
    others = {name: value for name, value in schema.items() if name != "patternProperties"}
    return {**others, "properties": {name: {"allOf": schemas} for name, schemas in held.items()}}


def _has_other_key(listed: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a key that is not listed can match a pattern; True for patterns that do not compile."""
    nothing = {"type": "null"}
    probe = {
        "type": "object",
        "properties": dict.fromkeys(listed, nothing),
        "patternProperties": dict.fromkeys(patterns, nothing),
        "required": list(listed),
        "additionalProperties": False,
    }
    begun = "".join(f"{_key(name)}:null," for name in listed)
    return any(_can_begin_with(probe, [f'{{{begun}"']))


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    keys = {name: _key(name) for name in names}
    matches = _can_begin_with({"type": "string", "pattern": pattern}, keys.values())
    return [name for name, is_match in zip(keys, matches, strict=True) if is_match]


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _can_begin_with(schema: Mapping[str, Any], texts: Iterable[str]) -> list[bool]:
    """For each text, whether an output may begin with it. True if the schema does not compile: it is refused later."""
    try:
        compiled = _compiler().compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except GrammarProblem:
        return [True for _ in texts]
    return [compiled.allows(text.encode("utf-8", "surrogatepass")) for text in texts]


@cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler.of_bytes()
