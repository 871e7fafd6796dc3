"""Finds the objects of a JSON schema that must stay open to unlisted properties.

Pure functions over a schema as parsed JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
"""Keywords that hold schemas: by name (MAPS), in a list (LISTS), or a single one (SINGLE)."""
BRANCHES = ("allOf", "anyOf", "oneOf", "dependentSchemas", "not", "if", "then", "else", "$ref")
"""Keywords whose schemas apply to the same value as the schema that contains them."""
CLOSING_KEYWORDS = ("additionalProperties", "unevaluatedProperties")


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """The schemas directly below this one, as (keyword, key or index under it, schema)."""
    for name, value in list(schema.items()):
        if name in MAPS and isinstance(value, dict):
            yield from ((name, key, below) for key, below in value.items())
        elif name in LISTS and isinstance(value, list):
            yield from ((name, index, below) for index, below in enumerate(value))
        elif name in SINGLE:
            yield name, None, value


def ids_to_leave_open(root: Mapping[str, Any]) -> frozenset[int]:
    """Ids of all schemas below `root` that must not be closed.

    A schema can be closed if it lists properties, says nothing about unlisted ones, requires none of them, and is the
    only schema that may list properties of its object.
    """
    shared: set[int] = set()
    nodes = list(nodes_of(root))
    for node in nodes:
        branches = list(_branches(node, root))
        if branches and (_lists_properties(node) or not (len(branches) == 1 or _are_alternatives(node))):
            shared.add(id(node))
            _share(branches, root, shared)
    return frozenset(id(node) for node in nodes if id(node) in shared or not _can_be_closed(node))


def nodes_of(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas of a document."""
    if isinstance(schema, dict):
        yield schema
        for _, _, below in subschemas(schema):
            yield from nodes_of(below)


def _share(schemas: list[Any], root: Mapping[str, Any], shared: set[int]) -> None:
    left = [*schemas]
    while left:
        schema = left.pop()
        if isinstance(schema, dict) and id(schema) not in shared:
            shared.add(id(schema))
            left += _branches(schema, root)


def _branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    for name in BRANCHES:
        if name == "$ref" and isinstance(schema.get(name), str):
            yield _at(schema[name], root)
    yield from (below for name, _, below in subschemas(schema) if name in BRANCHES)


def _are_alternatives(schema: Mapping[str, Any]) -> bool:
    """Whether a single branch decides on a value: only anyOf or only oneOf."""
    return [name for name in BRANCHES if name in schema] in (["anyOf"], ["oneOf"])


def _lists_properties(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("properties") or schema.get("patternProperties"))


def _can_be_closed(schema: Mapping[str, Any]) -> bool:
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not listed or any(name in schema for name in CLOSING_KEYWORDS):
        return False
    least = schema.get("minProperties", 0)
    asks_for_these = isinstance(required, list) and all(isinstance(name, str) and name in listed for name in required)
    return asks_for_these and isinstance(least, int) and least <= len(listed)


def _at(reference: str, root: Any) -> Any:
    """The schema that a reference within the document points to; None if there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, reference[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict):
            found = found.get(key)
        else:
            return None
    return found
