"""The running demo pair behind the APIs of OpenAI and Anthropic: their official clients, unchanged, and tools.

The demo's models know no tools: a template of the test's own shows them, and a call that is asked for comes by grammar.
"""

from __future__ import annotations

import http.client
import json
import time

import anthropic
import pytest

from deploy.settings import demo_config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Of a city"}
CHAT_TOOL = {"type": "function", "function": {**WEATHER, "parameters": PARAMETERS}}
HELLO = [{"role": "user", "content": "weather in Oslo"}]
MODEL = "outrider-demo"
BLOCK_TOKENS = demo_config([]).target.engine.block_tokens


@pytest.fixture
def claude(guarded):
    with anthropic.Anthropic(base_url=guarded.url, api_key=guarded.token, max_retries=0) as client:
        yield client


def assert_weather(arguments):
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Oslo", "Rome")
    assert 1 <= arguments["days"] <= 9


def test_a_chat_calls_a_tool_whole_and_streamed(client):
    given = {"model": MODEL, "messages": HELLO, "tools": [CHAT_TOOL], "seed": 3, "max_completion_tokens": 100}
    given["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    (choice,) = client.chat.completions.create(**given).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert_weather(json.loads(call.function.arguments))
    with client.chat.completions.stream(**given) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*HELLO, choice.message.model_dump(exclude_none=True), answer]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5).choices


def test_a_response_whole_and_streamed(client):
    given = {"model": MODEL, "input": "add two numbers", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**given)
    with client.responses.stream(**given) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "add two numbers"}], temperature=0, max_completion_tokens=16
    )
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens


def test_a_response_calls_a_tool(client):
    tool = {"type": "function", **WEATHER, "parameters": PARAMETERS}
    with client.responses.stream(
        model=MODEL, input=HELLO, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        (item,) = stream.get_final_response().output
    assert (item.type, item.name, item.arguments) == ("function_call", "weather", arguments)
    assert_weather(json.loads(arguments))


def test_a_message_whole_and_streamed(claude, client):
    given = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "add two numbers"}]}
    extra = {"extra_body": {"temperature": 0}}
    whole = claude.messages.create(**given, **extra)
    with claude.messages.stream(**given, **extra) as stream:
        assert stream.get_final_message().content[0].text == whole.content[0].text
    response = client.responses.create(model=MODEL, input="add two numbers", temperature=0, max_output_tokens=16)
    assert whole.content[0].text == response.output_text
    count = claude.messages.count_tokens(model=MODEL, messages=given["messages"])
    num_read = whole.usage.cache_read_input_tokens
    assert count.input_tokens == whole.usage.input_tokens + num_read == response.usage.input_tokens


def test_every_surface_says_what_of_a_prompt_was_cached(claude, client, grpc_client):
    """One long prompt by all of them: the first has computed it, the others take its whole blocks."""
    text = "".join(f"x{number} = {number * number}\n" for number in range(40))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    first = client.chat.completions.create(**chat, max_completion_tokens=4)
    num_prompt = first.usage.prompt_tokens
    num_shared = (num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert first.usage.prompt_tokens_details.cached_tokens < BLOCK_TOKENS < num_shared
    again = client.chat.completions.create(**chat, max_completion_tokens=4)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(**chat, max_completion_tokens=4, **options)
    for usage in (again.usage, last.usage):
        assert usage.prompt_tokens_details.cached_tokens == num_shared
    given = {"model": MODEL, "input": text, "max_output_tokens": 4}
    with client.responses.stream(**given) as stream:
        streamed = [each.response for each in stream if hasattr(each, "response")][-1]
    for response in (client.responses.create(**given), streamed):
        assert response.usage.input_tokens_details.cached_tokens == num_shared
    with claude.messages.stream(**chat, max_tokens=4) as stream:
        message = stream.get_final_message()
    for each in (claude.messages.create(**chat, max_tokens=4), message):
        assert (each.usage.input_tokens, each.usage.cache_read_input_tokens) == (num_prompt - num_shared, num_shared)
    assert grpc_client.generate(messages=chat["messages"], max_tokens=4, n=2).usage.cached_tokens == num_shared
    *_, chunk = grpc_client.stream(f"#{text}", max_tokens=4)
    assert chunk.usage.cached_tokens < num_shared, "another prompt, which begins like no other"
    *_, chunk = grpc_client.stream(f"#{text}", max_tokens=4)
    assert chunk.usage.cached_tokens == (chunk.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_message_calls_a_tool(claude):
    tool = {**WEATHER, "input_schema": PARAMETERS}
    given = {"model": MODEL, "max_tokens": 100, "messages": HELLO, "tools": [tool]}
    with claude.messages.stream(**given, tool_choice={"type": "tool", "name": "weather"}) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert_weather(call.input)


@pytest.mark.parametrize("num_tokens", [1, 3, 12, 24])
def test_what_was_cut_within_a_call_or_json_says_so_by_every_api(client, claude, num_tokens):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    given = {"model": MODEL, "messages": HELLO, "max_completion_tokens": num_tokens, "seed": 3}
    text = client.chat.completions.create(**given, response_format=schema).choices[0]
    assert text.finish_reason == "length" or json.loads(text.message.content)
    forced = client.chat.completions.create(**given, tools=[CHAT_TOOL], tool_choice="required").choices[0]
    assert (forced.message.content or "", forced.finish_reason) == ("", "length")
    tool = {"type": "function", **WEATHER, "parameters": PARAMETERS}
    asked = {"model": MODEL, "input": "weather in Oslo", "tools": [tool], "tool_choice": "required"}
    *_, last = client.responses.create(**asked, max_output_tokens=num_tokens, stream=True)
    assert last.response.status == "incomplete"
    assert last.response.output_text == ""
    by_anthropic = [{**WEATHER, "input_schema": PARAMETERS}]
    given = {"model": MODEL, "messages": HELLO, "tools": by_anthropic, "tool_choice": {"type": "any"}}
    message = claude.messages.create(**given, max_tokens=num_tokens)
    assert message.stop_reason == "max_tokens"
    assert all(block.type == "tool_use" and set(block.input) <= {"city", "days"} for block in message.content)


def test_an_answer_that_has_begun_goes_on_by_chat_and_message_alike(client, claude):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def add(a, b):\n    "}]
    given = {"model": MODEL, "messages": messages, "max_tokens": 12}
    own = {"continue_final_message": True, "echo": True, "prompt_logprobs": 1}
    chat = client.chat.completions.create(**given, temperature=0, extra_body=own)
    message = claude.messages.create(**given, extra_body={"temperature": 0})
    assert chat.choices[0].message.content == messages[-1]["content"] + message.content[0].text
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_errors_of_anthropic_s_api_have_its_form_in_the_proxy_too(claude, guarded):
    with pytest.raises(anthropic.BadRequestError, match="messages: must hold"):
        claude.messages.create(model=MODEL, max_tokens=5, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    connection = http.client.HTTPConnection("localhost", guarded.http_port, timeout=30)
    connection.putrequest("POST", "/v1/messages")
    connection.putheader("content-length", str(2**40))
    connection.endheaders()
    reply = connection.getresponse()
    body = json.load(reply)
    assert (reply.status, body["type"], body["error"]["type"]) == (413, "error", "request_too_large")
    connection.close()


def test_a_reader_that_reads_nothing_costs_no_more_than_its_request_may_have(client, grpc_client):
    """At most its `max_tokens` wait for it, and nobody else waits."""
    stream = client.completions.create(
        model=MODEL, prompt="a = ", max_tokens=600, stream=True, extra_body={"ignore_eos": True}
    )
    others = [
        client.completions.create(model=MODEL, prompt="b = ", max_tokens=8, extra_body={"ignore_eos": True})
        for _ in range(4)
    ]
    assert [each.usage.completion_tokens for each in others] == [8] * 4
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    stream.close()
    end_s = time.monotonic() + 60
    while grpc_client.model_info().control.sessions and time.monotonic() < end_s:
        time.sleep(0.02)
    assert grpc_client.model_info().control.sessions == 0
