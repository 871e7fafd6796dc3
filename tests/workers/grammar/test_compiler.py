"""A grammar that does not compile is named; one that would take too much is stopped by the library's limits."""

import json

import pytest
from grammars import DEMO, PERSON, VOCAB_SIZE, compiler, ids, lark, regex, schema

from core.records import Grammar, GrammarKind
from workers.grammar.compiler import GrammarCompiler, GrammarProblem

BAD = {
    "no JSON": (Grammar(GrammarKind.JSON_SCHEMA, '{"type":'), ""),
    "neither object nor boolean": (schema([1]), "Expecting object schema"),
    "an unknown type": (schema({"type": "strin"}), "Invalid type: strin"),
    "an unsupported keyword": (schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
    "an unsupported keyword that is to be ignored": (
        schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
        'Unimplemented keys: ["uniqueItems"]',
    ),
    "an unknown format": (schema({"type": "string", "format": "xyz"}), "Unknown format"),
    "a reference to elsewhere": (schema({"$ref": "http://example.com/x"}), "not present"),
    "nothing satisfies it": (schema({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable"),
    "false": (schema(False), "Expecting object schema"),
    "too large": (
        schema(
            {"type": "object", "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(10)]} for i in range(9000)}}
        ),
        "too big",
    ),
    "too deep": (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000), "recursion limit"),
    "a product of alternatives": (
        schema({"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for j in range(4)]} for i in range(10)]}),
        "schema too large",
    ),
    "an open group": (regex("(a"), "regex"),
    "look-around": (regex("(?=x)y"), "look-around"),
    "an unknown name": (lark("start: foo"), 'unknown name: "foo"'),
    "nothing": (lark(""), "Empty grammar"),
    "another notation": (lark('root ::= "a"'), "Expected token"),
    "nothing but itself": (schema({"$ref": "#"}), "no output that begins so"),
    "no first token": (regex("[^\\x00-\\U0010FFFF]"), ""),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("make", [compiler, GrammarCompiler.of_bytes], ids=["model", "bytes"])
def test_what_does_not_compile_is_refused_and_says_why(make, name):
    grammar, problem = BAD[name]
    with pytest.raises(GrammarProblem) as refused:
        make().compile(grammar)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "grammar",
    [
        schema(PERSON),
        schema({}),
        schema({"type": "object"}),
        regex("a{0,100000}"),
        lark('start: "a"'),
    ],
    ids=str,
)
def test_what_compiles_for_bytes_compiles_for_a_model(grammar):
    GrammarCompiler.of_bytes().compile(grammar)
    compiler().compile(grammar)


def test_whitespace_has_an_end():
    """Or a model that likes it would write nothing else."""
    compiled = compiler().compile(schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    assert compiled.allows(ids(json.dumps({"a": 1})))
    assert compiled.allows(ids(json.dumps({"a": 1}, indent=4)))
    assert compiled.allows(ids('{"a":1}'))
    assert not compiled.allows(ids('{\n\n"a"'))
    assert not compiled.allows(ids("{" + " " * 3))


def test_a_model_needs_a_tokenizer_and_an_end(tmp_path):
    with pytest.raises(GrammarProblem, match="end-of-sequence"):
        GrammarCompiler.of_model(DEMO, VOCAB_SIZE, ())
    with pytest.raises(GrammarProblem, match="does not serve grammars"):
        GrammarCompiler.of_model(tmp_path, VOCAB_SIZE, (0,))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarProblem, match="does not serve grammars"):
        GrammarCompiler.of_model(tmp_path, VOCAB_SIZE, (0,))
