"""/v1/messages, as the official anthropic client meets it, and every bad value by the name that the body has for it."""

from __future__ import annotations

import json

import anthropic
import pytest

from core.errors import DeadlinePassed, Overloaded, Unavailable
from core.records import FinishReason, GrammarKind
from deploy.api.authentication import Authenticator
from deploy.http.anthropic.bodies import ToolResultBlock
from tests.deploy.grpc.rpc import TOKENIZER, Script
from tests.deploy.http.clients import CALL, NO_FORMATS, app, by_anthropic, said, servicer, text_of_prompt

WEATHER = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO = [{"role": "user", "content": "say"}]
GIVEN = {"model": "pair", "max_tokens": 50, "messages": HELLO}


async def test_a_whole_message():
    script = Script(*said("hel", "lo", prompt=40, cached=32))
    async with by_anthropic(script) as client:
        message = await client.messages.create(**GIVEN, system="be brief", extra_body={"temperature": 0.5, "top_k": 5})
    assert (message.content[0].text, message.stop_reason, message.role) == ("hello", "end_turn", "assistant")
    assert (message.id, message.type, message.model) == ("msg_mine", "message", "pair")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (8, 32)
    assert text_of_prompt(script) == "system:be brief;user:say;"
    (request,) = script.requests
    assert (request.max_tokens, request.sampling.temperature, request.sampling.top_k) == (50, 0.5, 5)


async def test_a_stream_has_the_events_of_the_api_in_their_order():
    http = servicer(Script(*said("hel", "lo")))
    names = []

    async def receive():
        return {"body": json.dumps({**GIVEN, "stream": True}).encode()}

    async def send(message):
        for line in message.get("body", b"").decode().split("\n"):
            names.extend([line.removeprefix("event: ")] if line.startswith("event: ") else [])

    await app(http)({"method": "POST", "path": "/v1/messages", "headers": []}, receive, send)
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_the_client_s_own_stream_builds_the_message():
    script = Script(*said("hel", "lo", prompt=40, cached=32))
    async with by_anthropic(script) as client, client.messages.stream(**GIVEN) as stream:
        text = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text == final.content[0].text == "hello"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (8, 32)


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        (FinishReason.LENGTH, None, "max_tokens", None),
        (FinishReason.STOP, "!", "stop_sequence", "!"),
        (FinishReason.STOP, 1, "end_turn", None),
    ],
)
async def test_why_a_message_ended(finish, stop, reason, sequence):
    script = Script(*said("hel", "lo", finish=finish, stop=stop))
    async with by_anthropic(script) as client:
        whole = await client.messages.create(**GIVEN, stop_sequences=["!"])
        async with client.messages.stream(**GIVEN, stop_sequences=["!"]) as stream:
            final = await stream.get_final_message()
    assert script.requests[0].stop == ("!",)
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_a_call_is_a_block_and_comes_in_pieces():
    pieces = [CALL[i : i + 9] for i in range(0, len(CALL), 9)]
    async with by_anthropic(Script(*said("I look. ", *pieces))) as client:
        whole = await client.messages.create(**GIVEN, tools=[WEATHER])
        async with client.messages.stream(**GIVEN, tools=[WEATHER]) as stream:
            num_deltas = len([event async for event in stream if event.type == "input_json"])
            final = await stream.get_final_message()
    for message in (whole, final):
        text, call = message.content
        assert (text.text, call.type, call.name, call.input) == ("I look.", "tool_use", "weather", {"city": "Oslo"})
        assert message.stop_reason == "tool_use"
    assert num_deltas > 1


TWO = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": [1, "t'


@pytest.mark.parametrize(
    ("text", "given"),
    [(TWO, {"city": "Oslo", "days": [1]}), (TWO[:56], {}), (CALL[:-8], {"city": "Oslo"})],
    ids=str,
)
async def test_a_call_that_was_cut_has_what_is_whole_of_its_input_streamed_or_not(text, given):
    async with by_anthropic(Script(*said(text, finish=FinishReason.LENGTH))) as client:
        whole = await client.messages.create(**GIVEN, tools=[WEATHER])
        async with client.messages.stream(**GIVEN, tools=[WEATHER]) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert (message.content[0].input, message.stop_reason) == (given, "max_tokens")


async def test_an_input_that_is_no_object_is_said_to_be_none():
    text = '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'
    async with by_anthropic(Script(*said(text))) as client:
        (block,) = (await client.messages.create(**GIVEN, tools=[WEATHER])).content
    assert list(block.input) == ["INVALID_JSON"]


async def test_a_text_cites_nothing():
    """Clients that validate take no null for a list."""
    http, data = servicer(Script(*said("hello"))), b""

    async def receive():
        return {"body": json.dumps(GIVEN).encode()}

    async def send(message):
        nonlocal data
        data += message.get("body", b"")

    await app(http)({"method": "POST", "path": "/v1/messages", "headers": []}, receive, send)
    assert json.loads(data)["content"] == [{"type": "text", "text": "hello"}]


async def test_what_a_model_thinks_is_a_block():
    async with by_anthropic(Script(*said("<thi", "nk>\nhm, ", "yes\n</think>\n\n", "yes"))) as client:
        whole = await client.messages.create(**GIVEN)
        async with client.messages.stream(**GIVEN) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "hm, yes", "yes")


async def test_blocks_become_the_messages_of_a_chat():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    script = Script(*said("rain"))
    async with by_anthropic(script) as client:
        given = {"model": "pair", "messages": messages, "system": [{"type": "text", "text": "be brief"}]}
        await client.messages.create(**given, max_tokens=50)
        count = await client.messages.count_tokens(**given)
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    expected = f"system:be brief;user:weather?;assistant:<think>hm</think>I look{called};tool:rain;user:and now?;"
    assert text_of_prompt(script) == expected
    assert count.input_tokens == len(script.requests[0].prompt)


@pytest.mark.parametrize(
    ("given", "shown"), [({}, {}), ({"is_error": False}, {}), ({"is_error": True}, {"is_error": True})]
)
def test_a_template_is_told_of_results_that_are_errors_alone(given, shown):
    """Templates ask whether a message has a part."""
    result = ToolResultBlock(type="tool_result", tool_use_id="t", content="rain", **given)
    assert result.for_template("") == {"role": "tool", "content": "rain", "tool_call_id": "t", **shown}


async def test_a_system_message_may_stand_among_others():
    script = Script(*said("yes"))
    messages = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}]
    async with by_anthropic(script) as client:
        await client.messages.create(**{**GIVEN, "messages": messages})
    assert text_of_prompt(script) == "user:say;system:be brief;"


async def test_what_came_out_can_go_in_again():
    script = Script(*said("<think>hm</think>I look. ", CALL))
    async with by_anthropic(script) as client:
        first = await client.messages.create(**GIVEN, tools=[WEATHER])
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "rain"}
        messages = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await client.messages.create(**{**GIVEN, "messages": messages}, tools=[WEATHER])
    prompt = TOKENIZER.decode(script.requests[1].prompt)
    assert all(part in prompt for part in ("<think>hm</think>", "I look.", '"name": "weather"', "tool:rain;"))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_that_is_asked_for_is_held_to_by_a_grammar(choice):
    script = Script(*said(CALL))
    async with by_anthropic(script) as client:
        message = await client.messages.create(**GIVEN, tools=[WEATHER], tool_choice=choice)
    assert script.requests[0].grammar.kind is GrammarKind.LARK
    assert message.content[0].name == "weather"


async def test_a_schema_holds_the_text():
    script = Script(*said("{}"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with by_anthropic(script) as client:
        await client.messages.create(**GIVEN, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert script.requests[0].grammar.kind is GrammarKind.JSON_SCHEMA


async def test_thinking_that_is_not_wanted_is_told_to_the_template():
    script = Script(*said("yes"))
    async with by_anthropic(script) as client:
        await client.messages.create(**GIVEN, thinking={"type": "disabled"})
    assert text_of_prompt(script) == "user:say;quick"


async def test_what_agents_send_and_what_changes_nothing_is_taken():
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for fields in ({"context_management": kept}, {"context_management": {"edits": []}}, {"mcp_servers": []}):
        script = Script(*said("yes"))
        async with by_anthropic(script) as client:
            await client.messages.create(**GIVEN, extra_body=fields)
        assert text_of_prompt(script) == "user:say;"


async def test_an_answer_that_has_begun_goes_on():
    script = Script(*said(" sky"))
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The"}]}]
    async with by_anthropic(script) as client:
        message = await client.messages.create(**{**GIVEN, "messages": messages})
        count = await client.messages.count_tokens(model="pair", messages=messages)
    assert (text_of_prompt(script), message.content[0].text) == ("user:say;assistant:The", " sky")
    assert count.input_tokens == len(script.requests[0].prompt)


async def test_models_are_listed_as_the_client_knows_them():
    async with by_anthropic(Script()) as client:
        (card,) = [each async for each in client.models.list()]
        one = await client.models.retrieve("pair")
    for each in (card, one):
        assert (each.id, each.type, each.display_name, each.created_at.tzinfo is not None) == (
            *("pair", "model", "pair"),
            True,
        )


# Errors


@pytest.mark.parametrize(
    ("raised", "error", "kind"),
    [
        (Overloaded("full", 0.5), anthropic.RateLimitError, "rate_limit_error"),
        (Unavailable("nobody"), anthropic.APIStatusError, "overloaded_error"),
        (DeadlinePassed("late"), anthropic.APIStatusError, "timeout_error"),
        (ValueError("secret"), anthropic.InternalServerError, "api_error"),
    ],
)
async def test_errors_have_the_form_that_the_client_knows(raised, error, kind):
    async with by_anthropic(Script(raised)) as client:
        with pytest.raises(error) as refused:
            await client.messages.create(**GIVEN)
    body = refused.value.body
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, "mine")
    assert "secret" not in body["error"]["message"]


async def test_an_error_within_a_stream_is_the_client_s_own():
    async with by_anthropic(Script(said("a", "b")[0], Unavailable("lost"))) as client:
        with pytest.raises(anthropic.APIStatusError, match="lost"):
            async with client.messages.stream(**GIVEN) as stream:
                await stream.get_final_message()


async def test_a_key_is_asked_for(tmp_path):
    (tmp_path / "tokens").write_text("key\n")
    authenticator = Authenticator(tmp_path / "tokens")
    async with by_anthropic(Script(*said("yes")), authenticator=authenticator) as client:
        assert (await client.messages.create(**GIVEN)).content[0].text == "yes"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**GIVEN)


async def test_what_is_not_there_is_said():
    async with by_anthropic(Script()) as client:
        with pytest.raises(anthropic.NotFoundError, match="no batches"):
            await client.messages.batches.list()
        with pytest.raises(anthropic.NotFoundError, match="no model"):
            await client.messages.create(**{**GIVEN, "model": "other"})


def user(*blocks):
    return {"messages": [{"role": "user", "content": [*blocks]}]}


def assistant(*blocks):
    return {"messages": [*HELLO, {"role": "assistant", "content": [*blocks]}, *HELLO]}


USE = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
WRONG_TOOL = {"name": "other", "input_schema": {"not": {}}}
REFUSED = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "say"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a" * 50_000}]}, "messages"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages[1].content"),
    (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
    (user({"type": "document"}), "messages[0].content[0].type"),
    (user({"type": "tool_use", "id": "t", "name": "f", "input": {}}), "messages[0].content[0].type"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "x", "mood": 1}), "messages[0].content[0].mood"),
    (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    (
        user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "messages[0].content[0].content[0].type",
    ),
    (assistant({"type": "tool_use", "id": "t", "name": "f", "input": "x"}), "messages[1].content[0].input"),
    (assistant({"type": "redacted_thinking", "data": "x"}), "messages[1].content[0].type"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop": ["x"]}, "stop"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [WEATHER, WRONG_TOOL], "tool_choice": {"type": "any"}}, "tools[1].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}, "tools": [WEATHER]}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
    ({"output_config": {"effort": "high"}}, "output_config.effort"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
]


@pytest.mark.parametrize(
    ("fields", "name"), [pytest.param(*each, id=f"{each[1]}-{i}") for i, each in enumerate(REFUSED)]
)
async def test_a_bad_value_is_refused_by_its_name(fields, name):
    async with by_anthropic(Script()) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.post("/v1/messages", body={**GIVEN, **fields}, cast_to=object)
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{name}: ")
    assert "pydantic" not in error["message"]


@pytest.mark.parametrize("given", [{"template": None}, {"template": "{{ messages }}"}, {"http": NO_FORMATS}], ids=str)
async def test_tools_are_refused_where_the_model_has_no_calls(given):
    async with by_anthropic(Script(), **given) as client:
        with pytest.raises(anthropic.BadRequestError, match="tools: must not be given"):
            await client.messages.create(**GIVEN, tools=[WEATHER])
