"""/v1/responses, as the official openai client meets it, and every bad value by the name that the body has for it."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pydantic
import pytest

from core.errors import Unavailable
from core.records import FinishReason, GrammarKind, Usage
from tests.deploy.grpc.rpc import TOKENIZER, Script
from tests.deploy.http.clients import CALL, NO_FORMATS, by_openai, said, text_of_prompt

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


async def test_a_whole_response():
    script = Script(*said("hel", "lo", prompt=40, cached=32))
    async with by_openai(script) as client:
        response = await client.responses.create(
            model="pair", input="say", instructions="be brief", max_output_tokens=50, temperature=0.5, store=False
        )
    assert (response.status, response.output_text, response.object) == ("completed", "hello", "response")
    assert response.id == "resp_mine"
    assert (response.temperature, response.max_output_tokens, response.store) == (0.5, 50, False)
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (40, 32)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert text_of_prompt(script) == "system:be brief;user:say;"


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def test_a_stream_has_the_events_of_the_api_in_their_order():
    async with by_openai(Script(*said("hel", "lo"))) as client:
        events = [event async for event in await client.responses.create(model="pair", input="say", stream=True)]
    assert [event.type for event in events] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(EVENTS)))
    assert "".join(event.delta for event in events if event.type.endswith("delta")) == "hello"
    assert events[-1].response.output[0].content[0].text == "hello"
    assert events[0].response.status == events[1].response.status == "in_progress"


async def test_the_client_s_own_stream_builds_the_response():
    async with (
        by_openai(Script(*said("hel", "lo"))) as client,
        client.responses.stream(model="pair", input="say") as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "hello"
    assert kinds[0] == "response.created"


async def test_an_output_that_was_cut_off_is_incomplete():
    script = Script(*said("hel", "lo", finish=FinishReason.LENGTH))
    async with by_openai(script) as client:
        *_, last = [event async for event in await client.responses.create(model="pair", input="say", stream=True)]
        whole = await client.responses.create(model="pair", input="say")
    assert last.type == "response.incomplete"
    for response in (last.response, whole):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_an_error_within_a_stream_ends_it_as_failed():
    async with by_openai(Script(said("a", "b")[0], Unavailable("lost"))) as client:
        *_, last = [event async for event in await client.responses.create(model="pair", input="say", stream=True)]
    assert (last.type, last.response.status, last.response.error.message) == ("response.failed", "failed", "lost")


async def test_an_output_of_nothing_is_a_message_of_nothing():
    async with by_openai(Script(*said(""))) as client:
        response = await client.responses.create(model="pair", input="say")
    assert (response.output_text, len(response.output)) == ("", 1)


async def test_a_call_is_an_item_and_comes_in_pieces():
    pieces = [CALL[i : i + 9] for i in range(0, len(CALL), 9)]
    async with by_openai(Script(*said("I look. ", *pieces))) as client:
        given = {"model": "pair", "input": "weather?", "tools": [WEATHER]}
        whole = await client.responses.create(**given)
        events = [event async for event in await client.responses.create(**given, stream=True)]
    message, call = whole.output
    assert (message.content[0].text, call.type, call.name) == ("I look.", "function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 1
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    assert events[-1].response.output[1].arguments == call.arguments


async def events_of(script, **given):
    async with by_openai(script) as client:
        return [event async for event in await client.responses.create(model="pair", input="?", stream=True, **given)]


async def test_an_item_that_is_added_has_nothing_that_its_deltas_add():
    """Even where all of it comes at once."""
    events = await events_of(Script(*said(f"<think>hm</think>I look. {CALL}")), tools=[WEATHER])
    thought, message, call = [event.item for event in events if event.type == "response.output_item.added"]
    assert (thought.content, message.content, call.arguments) == ([], [], "")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("text", "status"),
    [(CALL[:60], "incomplete"), (CALL[:-8], "completed"), ("I look", "incomplete"), (CALL[:20], "incomplete")],
    ids=str,
)
async def test_an_item_that_was_cut_is_incomplete_in_every_event(text, status):
    """A call is whole where its arguments are, whatever became of the mark after them."""
    *_, done, last = await events_of(Script(*said(text, finish=FinishReason.LENGTH)), tools=[WEATHER])
    assert (done.type, done.item.status) == ("response.output_item.done", status)
    assert (last.type, last.response.output[-1].status) == ("response.incomplete", status)


async def test_of_a_response_that_failed_the_open_item_is_incomplete():
    *_, last = await events_of(Script(said("a", "b")[0], Unavailable("lost")))
    assert [item.status for item in last.response.output] == ["incomplete"]


async def test_no_more_tokens_are_thoughts_than_were_written():
    """The text of thoughts may take more tokens than the model wrote it in."""
    chunk = said("<think>hm, hm, hm", finish=FinishReason.LENGTH)[0]
    async with by_openai(Script(replace(chunk, usage=Usage(3, 2, 0)))) as client:
        usage = (await client.responses.create(model="pair", input="?")).usage
    assert usage.output_tokens_details.reasoning_tokens == usage.output_tokens == 2


async def test_what_a_model_thinks_is_an_item():
    async with by_openai(Script(*said("<thi", "nk>\nhm, ", "yes\n</think>\n\n", "yes"))) as client:
        whole = await client.responses.create(model="pair", input="say")
        events = [event async for event in await client.responses.create(model="pair", input="say", stream=True)]
    thought, message = whole.output
    assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "hm, yes", "yes")
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm, yes"


async def test_items_become_the_messages_of_a_chat():
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    script = Script(*said("rain"))
    async with by_openai(script) as client:
        await client.responses.create(model="pair", input=items)
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    expected = f"system:be brief;user:weather?;assistant:<think>hm</think>I look{called};tool:rain;"
    assert text_of_prompt(script) == expected


async def test_what_came_out_can_go_in_again():
    script = Script(*said("<think>hm</think>I look. ", CALL))
    async with by_openai(script) as client:
        first = await client.responses.create(model="pair", input="weather?", tools=[WEATHER])
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
        items = [{"role": "user", "content": "weather?"}, *first.output, output]
        await client.responses.create(model="pair", input=items, tools=[WEATHER])
    prompt = TOKENIZER.decode(script.requests[1].prompt)
    assert all(part in prompt for part in ("<think>hm</think>", "I look.", '"name": "weather"', "tool:rain;"))


async def test_a_schema_holds_the_text_and_parses():
    class City(pydantic.BaseModel):
        city: str

    script = Script(*said('{"city": "Oslo"}'))
    async with by_openai(script) as client:
        parsed = await client.responses.parse(model="pair", input="say", text_format=City)
    assert parsed.output_parsed == City(city="Oslo")
    assert script.requests[0].grammar.kind is GrammarKind.JSON_SCHEMA


async def test_what_agents_ask_for_unasked_and_what_changes_nothing_is_taken():
    script = Script(*said("yes"))
    async with by_openai(script) as client:
        given = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
        response = await client.responses.create(model="pair", input="say", **given)
    assert (response.output_text, response.reasoning.summary) == ("yes", "auto")
    assert text_of_prompt(script) == "user:say;"


async def test_a_reference_to_what_is_not_kept_is_refused_with_what_to_do():
    """The AI SDK of npm sends them unless it is told that nothing is stored."""
    async with by_openai(Script()) as client:
        with pytest.raises(openai.BadRequestError, match="store is false"):
            await client.responses.create(model="pair", input=[{"type": "item_reference", "id": "msg_1"}])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_forced_call_is_no_text_that_a_format_could_hold(choice):
    """instructor sends such requests."""
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    script = Script(*said(CALL))
    async with by_openai(script) as client:
        given = {"model": "pair", "input": "say", "tools": [WEATHER], "tool_choice": choice}
        await client.responses.create(**given)
        response = await client.responses.create(**given, text={"format": schema})
    assert script.requests[0].grammar == script.requests[1].grammar
    assert response.output[0].name == "weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_call_that_is_asked_for_is_held_to_by_a_grammar(choice):
    script = Script(*said(CALL))
    async with by_openai(script) as client:
        response = await client.responses.create(model="pair", input="say", tools=[WEATHER], tool_choice=choice)
    assert script.requests[0].grammar.kind is GrammarKind.LARK
    assert response.output[0].name == "weather"


REFUSED = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": "a" * 50_000}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": 0, "role": "user", "content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "", "role": "user", "content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stop": ["x" * 300]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"background": True}, "background"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"include": ["thoughts"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [{**WEATHER, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{**WEATHER, "parameters": {"not": {}}}], "tool_choice": "required"}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "maybe", "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"tool_choice": {"type": "file_search"}, "tools": [WEATHER]}, "tool_choice.type"),
    ({"tool_choice": "required", "tools": [WEATHER], "guided_regex": "a"}, "tool_choice"),
    ({"tools": [WEATHER], "guided_regex": "a"}, "guided_regex"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"colour": "red"}, "colour"),
]


@pytest.mark.parametrize(
    ("fields", "param"), [pytest.param(*each, id=f"{each[1]}-{i}") for i, each in enumerate(REFUSED)]
)
async def test_a_bad_value_is_refused_by_its_name(fields, param):
    async with by_openai(Script()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body={"model": "pair", "input": "say", **fields}, cast_to=object)
    assert refused.value.param == param
    assert "pydantic" not in str(refused.value)


@pytest.mark.parametrize("given", [{"template": None}, {"template": "{{ messages }}"}, {"http": NO_FORMATS}], ids=str)
async def test_tools_are_refused_where_the_model_has_no_calls(given):
    async with by_openai(Script(), **given) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="pair", input="say", tools=[WEATHER])
    assert refused.value.param == "tools"


async def test_what_is_not_kept_is_said():
    async with by_openai(Script()) as client:
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            await client.responses.retrieve("resp_1")
