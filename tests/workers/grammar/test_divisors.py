"""Bounds on the cost of multipleOf, for which the library has none."""

import pytest

from core.records import Grammar, GrammarKind
from workers.grammar.compiler import GrammarCompiler, GrammarProblem
from workers.grammar.divisors import problem_of_divisors


@pytest.mark.parametrize(
    "text",
    [
        '{"multipleOf": 19997}',
        '{"multipleOf": 0.01}',
        '{"multipleOf": 1000000}',
        '{"multipleOf": 0.5, "anyOf": [{"multipleOf": 15}]}',
        '{"properties": {"multipleOf": {"type": "string"}}}',
        '{"const": "multipleOf\\": 1000003"}',
        '{"multipleOf": 0}',
        '{"multipleOf": "a"}',
        '{"multipleOf": --1}',
        '{"multipleOf": 1e999999999}',
    ],
)
def test_what_is_cheap_is_left_to_the_library(text):
    assert problem_of_divisors(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"multipleOf": 1000003}',
        '{"multipleOf" :\n 19997000}',
        '{"multipleOf": 1000.03}',
        '{"multipleOf": 1.00000007e8}',
        '{"multipleOf": 1e99}',
        '{"multipleOf": 1e-99}',
        '{"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}',
        '{"multiple\\u004Ff": 1000003}',
        'start: %json{"multipleOf":1000003}',
    ],
)
def test_what_would_take_seconds_is_refused(text):
    assert "multipleOf" in problem_of_divisors(text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 100000007}'),
        Grammar(GrammarKind.LARK, 'start: %json {"type": "integer", "multipleOf": 100000007}'),
    ],
    ids=["json_schema", "lark"],
)
def test_a_compiler_refuses_it_before_it_asks_the_library(grammar):
    with pytest.raises(GrammarProblem, match="multipleOf is followed up to 20000"):
        GrammarCompiler.of_bytes().compile(grammar)
