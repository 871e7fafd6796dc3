"""A JSON schema is obeyed exactly, or refused before anything is computed."""

import json

import pytest

from core.config import Limits
from core.errors import InvalidRequest
from workers.grammar.compiler import GrammarCompiler
from workers.grammar.schemas import FORMATS
from workers.grammar.structure import Structure, grammar_of

A = {"type": "object", "properties": {"a": {"type": "boolean"}}}
NEEDS_A = {**A, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}}
BOTH = '{"a":true,"b":1}'


def takes(schema, text, **settings):
    """Whether `text` is a whole output."""
    compiled = GrammarCompiler.of_bytes().compile(grammar_of(Structure("json_schema", schema), Limits(), **settings))
    matcher = compiled.start.deep_copy()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def problem_with(schema, kind="json_schema"):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(Structure(kind, schema), Limits())
    assert refused.value.field == f"structured_output.{kind}"
    return refused.value.problem


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 1234567890123456789}, "const"),
        ({"properties": {"x": {"items": {"enum": ["x", {"y": [-9007199254740993]}]}}}}, "properties.x.items.enum"),
        ({"anyOf": [{"type": "null"}, {"minimum": 2**53 + 1}]}, "anyOf.1.minimum"),
        ({"$defs": {"n": {"maximum": -(2**53) - 1}}}, "$defs.n.maximum"),
        ({"type": "integer", "exclusiveMaximum": 10**17}, "exclusiveMaximum"),
        ({"type": "number", "exclusiveMinimum": 1e17}, "exclusiveMinimum"),
        ({"const": 10**400}, "const"),
    ],
)
def test_a_number_that_would_become_another_is_refused_by_its_place(schema, place):
    assert f"cannot be followed: {place} cannot be held to exactly" in problem_with(schema)


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**18, 2**60])
def test_a_number_that_a_double_has_is_held_to(number):
    assert takes({"const": number}, str(number))
    assert not takes({"const": number}, str(number + 1))
    assert takes({"enum": [number]}, str(number))
    assert not takes({"type": "integer", "maximum": number}, str(number + 1))
    assert takes({"type": "integer", "maximum": number}, str(number))


def test_a_number_that_says_nothing_of_the_output_may_be_any():
    assert takes({"type": "integer", "default": 2**53 + 1, "examples": [2**53 + 1]}, "3")
    assert takes({**A, "properties": {"const": {"type": "integer"}, "enum": {}}}, '{"const":1}')


def test_keys_that_may_repeat_are_not_counted():
    open_ = {"additionalProperties": {"type": "boolean"}}
    assert "minProperties is held to up to one more" in problem_with({"type": "object", **open_, "minProperties": 2})
    assert "items.minProperties" in problem_with({"items": {**NEEDS_A, **open_, "minProperties": 3}})
    patterns = {"patternProperties": {"^x": {}}, "additionalProperties": False}
    assert "(1), since" in problem_with({"type": "object", **patterns, "minProperties": 2})
    assert takes({"type": "object", **open_, "minProperties": 1}, '{"b":true}')
    two = {**NEEDS_A, **open_, "minProperties": 2}
    assert [takes(two, text) for text in ('{"a":true}', '{"a":true,"b":true}', '{"a":true,"a":true}')] == [
        False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["^a$", "^[a]{1}$", "^(a|b)$"])
@pytest.mark.parametrize("closed", [{}, {"additionalProperties": False}])
def test_a_pattern_that_only_listed_properties_match_leads_into_no_dead_end(pattern, closed):
    listed = {"properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}}
    schema = {**A, **(listed if "b" in pattern else {}), **closed, "patternProperties": {pattern: {"enum": [True]}}}
    assert takes(schema, '{"a":true}')
    assert takes(schema, "{}")
    assert not takes(schema, '{"a":false}')
    compiled = GrammarCompiler.of_bytes().compile(grammar_of(Structure("json_schema", schema), Limits()))
    assert not compiled.allows(b'{"a":true,\n"a')
    assert compiled.allows(b'{"a":true,') == ("b" in pattern)


def test_a_pattern_that_others_match_too_stays():
    schema = {**A, "patternProperties": {"^a": {"type": "boolean"}}}
    assert takes(schema, '{"a":true,"ab":false}')
    assert not takes(schema, '{"a":true,"ab":1}')
    assert not takes(schema, '{"a":true,"b":true}')


@pytest.mark.parametrize("form", ["path", "file-path", "password", "binary", "json-string", "jwt", "e164", "int64"])
def test_a_format_that_nobody_knows_is_an_annotation(form):
    assert takes({"type": "string", "format": form}, '"x"')


@pytest.mark.parametrize("form", sorted(FORMATS - {"unknown"}))
def test_a_format_that_the_library_knows_is_held_to(form):
    assert not takes({"type": "string", "format": form}, '" "')


@pytest.mark.parametrize(
    "also",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": "string", "description": "a name"}},
        {"propertyNames": True},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"not": False},
    ],
    ids=str,
)
def test_keywords_that_ask_for_nothing_are_ignored(also):
    assert takes({"type": "object", "additionalProperties": {"type": "integer"}, **also}, '{"x":1}')


@pytest.mark.parametrize("also", [{"propertyNames": {"pattern": "^a"}}, {"uniqueItems": True}, {"not": {}}], ids=str)
def test_keywords_that_ask_for_something_are_not(also):
    assert "Unimplemented keys" in problem_with({"type": "object", **also})


def test_no_problem_names_an_option_that_cannot_be_set():
    problem = problem_with({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]})
    assert "coerce" not in problem
    assert "use anyOf" in problem


@pytest.mark.parametrize("value", [None, 5, "x", [], [{}], {}, {"x": 5}, True], ids=str)
@pytest.mark.parametrize(
    "keyword",
    ["properties", "patternProperties", "required", "minProperties", "propertyNames", "format", "$ref", "allOf",
     "items", "enum", "minimum", "$defs", "additionalProperties", "type"],
)  # fmt: skip
def test_a_schema_that_is_none_is_followed_or_refused(keyword, value):
    """And nothing else happens."""
    for schema in ({keyword: value}, {**NEEDS_A, "patternProperties": {"^a$": {}}, "minProperties": 1, keyword: value}):
        try:
            grammar_of(Structure("json_schema", schema), Limits())
        except InvalidRequest as error:
            assert error.field == "structured_output.json_schema"  # noqa: PT017 - or none is raised


CLOSED = {
    "that lists properties": A,
    "under others": {"items": A},
    "that is one of several": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": A}},
    "of a single part": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}},
}
OPEN = {
    "that says so": {**A, "additionalProperties": True},
    "that lists nothing": {"type": "object"},
    "of several parts": {"allOf": [NEEDS_A, {**B, "required": ["b"]}]},
    "of parts by name": {
        "allOf": [{"$ref": "#/$defs/a"}, {**B, "required": ["b"]}],
        "properties": {},
        "$defs": {"a": NEEDS_A},
    },
    "beside a part": {**A, "anyOf": [{"required": ["a"]}, {**B, "required": ["b"]}]},
    "that asks for another": {**A, "required": ["b"]},
    "that asks for more": {**NEEDS_A, "minProperties": 2},
}


def in_list(schema, text):
    return f"[{text}]" if "items" in schema else text


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_is_closed(name):
    schema = CLOSED[name]
    assert takes(schema, in_list(schema, '{"a":true}'))
    assert not takes(schema, in_list(schema, BOTH))
    assert takes(schema, in_list(schema, BOTH), closes_schemas=False)


@pytest.mark.parametrize("name", OPEN)
def test_an_object_stays_open(name):
    assert takes(OPEN[name], BOTH)


def test_a_schema_within_a_grammar_is_held_to_alike():
    lark = f'start: "x" %json {json.dumps(A)} "y" %json {json.dumps({"type": "null"})}'
    compiled = GrammarCompiler.of_bytes().compile(grammar_of(Structure("grammar", lark), Limits()))
    assert compiled.allows(b'x{"a":true}ynull')
    assert not compiled.allows(b'x{"a":true,')
    number = json.dumps({"properties": {"a": {"const": 2**53 + 1}}})
    assert "properties.a.const cannot be held to" in problem_with(f"start: %json {number}", "grammar")


def test_patterns_that_would_take_the_library_long_are_refused():
    half = {"type": "object", "patternProperties": {f"^p{number}$": {} for number in range(51)}}
    assert "at most 100 patterns together, got 102" in problem_with({"allOf": [half, half]})
    assert takes(half, "{}")


def test_a_long_chain_of_parts_is_followed():
    chain = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"properties": {"x": {}}}]} for i in range(600)}
    assert "nested" not in problem_with({"$ref": "#/$defs/a0", "$defs": {**chain, "a600": {"not": {}}}})


def test_schemas_that_are_shared_by_very_many_properties_are_refused():
    listed = {name: {} for name in "abcdefghi"}
    schema = {"type": "object", "properties": listed, "patternProperties": {"^[a-i]$": {"enum": ["x" * 40_000]}}}
    assert "give them once" in problem_with(schema)
    schema["patternProperties"] = {"^[a-i]$": {"enum": ["x" * 400]}}
    assert takes(schema, "{}")
