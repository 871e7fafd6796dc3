"""Tools and thoughts of /v1/chat/completions, as the official openai client meets them."""

from __future__ import annotations

import json

import openai
import pytest

from core.config import HttpConfig
from core.records import FinishReason, GrammarKind
from tests.deploy.grpc.rpc import Script
from tests.deploy.http.clients import CALL, NO_FORMATS, by_openai, said, text_of_prompt

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
GIVEN = {"model": "pair", "messages": [{"role": "user", "content": "weather?"}]}


async def created(script, **fields):
    async with by_openai(script) as client:
        return await client.chat.completions.create(**GIVEN, **fields)


async def test_a_whole_call():
    script = Script(*said("I look. ", CALL))
    (choice,) = (await created(script, tools=[WEATHER])).choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Oslo"},
    )
    assert call.id.isalnum()
    assert len(call.id) == 9
    assert "<tool>" in text_of_prompt(script)


async def test_a_call_in_pieces_as_the_client_s_own_stream_builds_it():
    pieces = [CALL[i : i + 7] for i in range(0, len(CALL), 7)]
    async with (
        by_openai(Script(*said("I look. ", *pieces))) as client,
        client.chat.completions.stream(**GIVEN, tools=[WEATHER]) as stream,
    ):
        deltas = [event.chunk.choices[0].delta async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["weather", *[None] * (len(calls) - 1)]
    assert {call.index for call in calls} == {0}
    assert len(calls) > 1


async def test_a_call_that_was_cut_off_ends_with_length():
    script = Script(*said(CALL[:40], finish=FinishReason.LENGTH))
    assert (await created(script, tools=[WEATHER])).choices[0].finish_reason == "length"


@pytest.mark.parametrize("size", range(1, len(CALL), 5))
async def test_of_a_forced_call_that_was_cut_nothing_is_content(size):
    script = Script(*said(CALL[:size], finish=FinishReason.LENGTH))
    (choice,) = (await created(script, tools=[WEATHER], tool_choice="required")).choices
    assert (choice.message.content or "", choice.finish_reason) == ("", "length")


async def test_texts_before_and_after_a_call_are_parted():
    texts = ("I look. ", CALL, "\nDone", ".")
    message = (await created(Script(*said(*texts)), tools=[WEATHER])).choices[0].message
    stream = await created(Script(*said(*texts)), tools=[WEATHER], stream=True)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert message.content == "".join(deltas) == "I look.\nDone."


async def test_an_answer_without_a_call_stays_as_it_is():
    message = (await created(Script(*said("no ", "need")), tools=[WEATHER])).choices[0].message
    assert (message.content, message.tool_calls) == ("no need", None)


async def test_of_n_samples_each_has_calls_of_its_own():
    choices = (await created(Script(*said(CALL)), tools=[WEATHER], n=2)).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1]


async def test_tools_that_may_not_be_called_are_not_shown():
    script = Script(*said(CALL))
    message = (await created(script, tools=[WEATHER], tool_choice="none")).choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)
    assert "<tool>" not in text_of_prompt(script)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_is_asked_for_is_held_to_by_a_grammar(choice):
    script = Script(*said(CALL))
    await created(script, tools=[WEATHER], tool_choice=choice)
    (request,) = script.requests
    assert request.grammar.kind is GrammarKind.LARK
    assert "weather" in request.grammar.text


async def test_one_call_is_all_that_is_given_where_several_are_not_wanted():
    message = (await created(Script(*said(CALL, CALL)), tools=[WEATHER], parallel_tool_calls=False)).choices[0].message
    assert len(message.tool_calls) == 1


async def test_a_forced_call_is_no_text_that_a_format_could_hold():
    script = Script(*said(CALL))
    forced = {"tools": [WEATHER], "tool_choice": "required"}
    await created(script, **forced)
    message = (await created(script, **forced, response_format={"type": "json_object"})).choices[0].message
    assert script.requests[0].grammar == script.requests[1].grammar
    assert len(message.tool_calls) == 1


async def test_an_answer_may_be_held_to_a_schema_beside_tools():
    script = Script(*said('{"a": 1}'))
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    form = {"type": "json_schema", "json_schema": schema}
    message = (await created(script, tools=[WEATHER], response_format=form)).choices[0].message
    assert message.content == '{"a": 1}'
    assert script.requests[0].grammar.text.startswith("start: calls | answer")


async def test_a_schema_beside_tools_is_refused_where_calls_are_json_too():
    async with by_openai(Script(), http=HttpConfig("llama3_json")) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**GIVEN, tools=[WEATHER], response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_what_was_called_goes_to_the_template(name):
    script = Script(*said("rain"))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *GIVEN["messages"],
        {"role": "assistant", "content": None, name: "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    async with by_openai(script) as client:
        await client.chat.completions.create(model="pair", messages=messages)
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert text_of_prompt(script) == f"user:weather?;assistant:<think>hm</think>{called};tool:rain;"


async def test_thoughts_are_a_field_of_their_own():
    texts = ("<thi", "nk>\nhm, ", "yes\n</think>\n\n", "yes")
    message = (await created(Script(*said(*texts)))).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm, yes", "yes")
    assert message.reasoning == message.reasoning_content
    stream = await created(Script(*said(*texts)), stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "hm, yes"
    assert "".join(delta.content or "" for delta in deltas) == "yes"


async def test_thoughts_stay_in_the_text_where_the_service_is_set_so():
    async with by_openai(Script(*said("<think>hm</think>yes")), http=NO_FORMATS) as client:
        message = (await client.chat.completions.create(**GIVEN)).choices[0].message
    assert message.content == "<think>hm</think>yes"


async def test_an_output_that_is_held_to_a_grammar_has_no_thoughts():
    message = (await created(Script(*said("<think>")), extra_body={"guided_choice": ["<think>"]})).choices[0].message
    assert message.content == "<think>"


async def test_what_else_a_template_takes_is_given_to_it():
    script = Script(*said("yes"))
    await created(script, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert text_of_prompt(script).endswith("quick")


def function(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


WRONG = function(parameters={"not": {}})["tools"]


def messages(*more):
    return {"messages": [*GIVEN["messages"], *more]}


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED = [
    ({"tools": "f"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (function(name=""), "tools[0].function.name"),
    (function(name="a b"), "tools[0].function.name"),
    (function(parameters=[]), "tools[0].function.parameters"),
    (function(mood=1), "tools[0].function.mood"),
    ({"tools": [WEATHER] * 2}, "tools[1].function.name"),
    ({"tools": [WEATHER] * 300}, "tools"),
    ({**function(parameters={"not": {}}), "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": [WEATHER, *WRONG], "tool_choice": "required"}, "tools[1].function.parameters"),
    (
        {"tools": [WEATHER, *WRONG], "response_format": {"type": "json_object"}},
        "tools[1].function.parameters",
    ),
    (
        {
            "tools": [WEATHER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}},
        },
        "response_format.json_schema.schema",
    ),
    ({**function(), "tool_choice": "any"}, "tool_choice"),
    ({**function(), "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({**function(), "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({**function(), "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({**function(), "guided_regex": "a"}, "guided_regex"),
    ({**function(), "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({**function(), "parallel_tool_calls": 1}, "parallel_tool_calls"),
    (messages({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}), "messages[1].reasoning"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    (messages({"role": "user", "content": "x", "tool_calls": [CALLED]}), "messages[1].tool_calls"),
    (messages({"role": "user", "content": "x", "tool_call_id": "c"}), "messages[1].tool_call_id"),
    (messages({"role": "assistant", "tool_calls": [{**CALLED, "type": "custom"}]}), "messages[1].tool_calls[0].type"),
    (
        messages({"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "[]"}}]}),
        "messages[1].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param"), [pytest.param(*each, id=f"{each[1]}-{i}") for i, each in enumerate(REFUSED)]
)
async def test_a_bad_value_is_refused_by_its_name(fields, param):
    async with by_openai(Script()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/chat/completions", body={**GIVEN, **fields}, cast_to=object)
    assert refused.value.param == param


@pytest.mark.parametrize("given", [{"template": None}, {"template": "{{ messages }}"}, {"http": NO_FORMATS}], ids=str)
async def test_tools_are_refused_where_the_model_has_no_calls(given):
    async with by_openai(Script(), **given) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**GIVEN, tools=[WEATHER])
    assert refused.value.param == "tools"
