"""A structured output becomes a grammar that compiles, or is refused by the name of its field."""

import json

import pytest

from core.config import Limits
from core.errors import InvalidRequest
from core.records import Grammar, GrammarKind
from workers.grammar.compiler import GrammarCompiler
from workers.grammar.structure import Structure, grammar_of, template_of

LIMITS = Limits()


def test_each_kind_becomes_a_grammar():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "additionalProperties": False}
    written = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert grammar_of(Structure("json_schema", schema), LIMITS) == written
    assert grammar_of(Structure("json_schema", json.dumps(schema, indent=4)), LIMITS) == written
    anything = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    assert grammar_of(Structure("json_object", True), LIMITS) == anything
    assert grammar_of(Structure("regex", "[0-9]+"), LIMITS) == Grammar(GrammarKind.REGEX, "[0-9]+")
    assert grammar_of(Structure("grammar", 'start: "a"'), LIMITS) == Grammar(GrammarKind.LARK, 'start: "a"')
    assert grammar_of(Structure("choice", ["a", "b.c"]), LIMITS) == Grammar(GrammarKind.REGEX, "a|b\\.c")


@pytest.mark.parametrize(
    "choice", ["a b", "x|y", "ta\tb", "li\nne", "<e>", "\u00e9", "a-b", "#~&%", "\\d", "/", '"', "\x01"]
)
def test_a_choice_is_taken_by_the_letter(choice):
    compiled = GrammarCompiler.of_bytes().compile(grammar_of(Structure("choice", [choice, "zz"]), LIMITS))
    assert compiled.allows(choice.encode())
    assert not compiled.allows(choice.encode() + b"x")
    assert not compiled.allows(b"q")


@pytest.mark.parametrize(
    ("structure", "field", "problem"),
    [
        (Structure("json_schema", ""), "json_schema", "must not be empty"),
        (Structure("json_schema", '{"a":'), "json_schema", "is not JSON"),
        (Structure("json_schema", '1 }], "x": [{'), "json_schema", "is not JSON"),
        (Structure("json_schema", "[1]"), "json_schema", "must be a JSON object, got '[1]'"),
        (Structure("json_schema", {"const": float("nan")}), "json_schema", "is not JSON"),
        (Structure("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "json_schema", "is nested too deeply"),
        (Structure("json_schema", {"not": {}}), "json_schema", 'cannot be followed: Unimplemented keys: ["not"]'),
        (Structure("json_schema", {"type": "strin"}), "json_schema", "Invalid type"),
        (
            Structure("json_schema", {"enum": ["x" * 2**20]}),
            "json_schema",
            "must be at most 65536 bytes long, got 1048",
        ),
        (Structure("json_schema", " " * 2**20 + "{}"), "json_schema", "must be at most 65536 bytes long, got 1048"),
        (Structure("json_object", False), "json_object", "must be true"),
        (Structure("regex", "(a"), "regex", "unclosed group"),
        (Structure("regex", "(?=a)b"), "regex", "look-around"),
        (Structure("regex", "a" * 70_000), "regex", "must be at most 65536 bytes long, got 70000"),
        (Structure("choice", []), "choice", "must hold at least one text"),
        (Structure("choice", ["a", ""]), "choice[1]", "must not be empty"),
        (Structure("choice", ["a" * 40_000, "b" * 40_000]), "choice", "must be at most 65536 bytes long, got 80000"),
        (Structure("grammar", "start: foo"), "grammar", "unknown name"),
        (Structure("grammar", 'root ::= "a"'), "grammar", "cannot be followed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_held_to_is_refused_by_name(structure, field, problem):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(structure, LIMITS)
    assert refused.value.field == f"structured_output.{field}"
    assert problem in refused.value.problem


def test_a_service_may_serve_none():
    with pytest.raises(InvalidRequest, match="is not served here"):
        grammar_of(Structure("regex", "a"), Limits(max_grammar_bytes=0))
    with pytest.raises(InvalidRequest, match=r"speculation\.template: is not served here"):
        template_of("a", Limits(max_grammar_bytes=0))


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "must not be empty"),
        ("(a", "cannot be followed: .*unclosed group"),
        ("(?=a)b", "look-around"),
        ("a" * 70_000, "must be at most 65536 bytes long, got 70000"),
    ],
    ids=lambda value: value[:20],
)
def test_a_template_that_cannot_be_followed_is_refused_by_its_own_name(expression, problem):
    with pytest.raises(InvalidRequest, match=problem) as refused:
        template_of(expression, LIMITS)
    assert refused.value.field == "speculation.template"


def test_a_template_is_an_expression():
    assert template_of("Dear .*,", LIMITS) == Grammar(GrammarKind.REGEX, "Dear .*,")


@pytest.mark.parametrize(
    "structure",
    [
        Structure("grammar", "\n".join(["start:r0", *(f"r{i}:r{i + 1}" for i in range(4500)), 'r4500:"a"'])),
        Structure(
            "json_schema",
            {
                "$ref": "#/$defs/0",
                "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1400)} | {"1400": {}},
            },
        ),
    ],
)
def test_a_long_chain_of_rules_does_not_overflow_the_stack_which_would_end_the_process(structure):
    assert GrammarCompiler.of_bytes().compile(grammar_of(structure, LIMITS)).vocab_size == 257
