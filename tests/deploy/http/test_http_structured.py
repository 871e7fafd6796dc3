"""OpenAI's and vLLM's ways to say what the output must look like, and the names by which each is refused."""

import json
from dataclasses import replace

import pytest
from test_http_translate import CONFIG, NOW, chat, completion, served

from core.errors import InvalidRequest
from core.records import Grammar, GrammarKind
from deploy.http.failures import parse
from deploy.http.openai import CompletionBody
from deploy.http.translate import to_requests

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELD_TO = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**SCHEMA, "additionalProperties": False}))
ANYTHING = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")
CHOICE = Grammar(GrammarKind.REGEX, "a|b")
LARK = Grammar(GrammarKind.LARK, 'start: "a"')


def openai_schema(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, **fields}}}


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, ANYTHING),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, HELD_TO),
        (openai_schema(schema=SCHEMA), HELD_TO),
        ({"structured_outputs": {"json": SCHEMA}}, HELD_TO),
        ({"structured_outputs": {"json_object": True}}, ANYTHING),
        ({"structured_outputs": {"regex": "[0-9]+"}}, DIGITS),
        ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, LARK),
        ({"guided_json": SCHEMA}, HELD_TO),
        ({"guided_json": '{"type":"object","properties":{"a":{"type":"integer"}}}'}, HELD_TO),
        ({"guided_regex": "[0-9]+"}, DIGITS),
        ({"guided_choice": ["a", "b"]}, CHOICE),
        ({"guided_grammar": 'start: "a"'}, LARK),
    ],
    ids=str,
)
def test_each_way_arrives(make, fields, grammar):
    (request,) = make(**fields)
    assert request.grammar == grammar


def test_a_service_may_leave_schemas_open():
    body = parse(CompletionBody, json.dumps({"prompt": "say", "guided_json": SCHEMA}).encode())
    (request,) = to_requests(body, served(config=replace(CONFIG, close_schemas=False)), NOW, "mine")
    assert request.grammar == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def test_every_sample_is_held_to_it():
    assert [request.grammar for request in completion(n=3, guided_regex="[0-9]+")] == [DIGITS] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (openai_schema(), "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (openai_schema(schema={"type": "strin"}), "response_format.json_schema.schema"),
        (openai_schema(schema={"type": "array", "uniqueItems": True}), "response_format.json_schema.schema"),
        (openai_schema(schema={"enum": ["x" * 2**20]}), "response_format.json_schema.schema"),
        (openai_schema(schema="{}"), "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice"),
        ({"guided_grammar": "start: b"}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong_is_named_as_the_body_has_it(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.field == param
