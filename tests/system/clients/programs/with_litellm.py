"""The SDK of litellm: completions, chats, responses and Anthropic's messages, whole and as streams."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks for the prices of models at each import

import litellm
from checks import CITIES, KEY, MODEL, SCHEMA, URL, run

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
HOSTED = {**OPENAI, "model": f"hosted_vllm/{MODEL}"}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "where?"}]
TOOL = {"type": "function", "function": {"name": "place", "description": "Where", "parameters": SCHEMA}}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "place"}}, "max_tokens": 80}


def check_a_chat_by_each_provider():
    for given in (OPENAI, HOSTED, ANTHROPIC):
        reply = litellm.completion(**given, messages=MESSAGES, max_tokens=12)
        assert reply.choices[0].finish_reason in ("length", "stop")
        assert reply.usage.completion_tokens > 0


def check_a_stream_by_each_provider():
    for given in (OPENAI, HOSTED, ANTHROPIC):
        chunks = list(
            litellm.completion(
                **given, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
            )
        )
        whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens > 0


def check_a_forced_call_by_each_provider():
    for given in (OPENAI, HOSTED, ANTHROPIC):
        (call,) = litellm.completion(**given, **FORCED, messages=MESSAGES).choices[0].message.tool_calls
        assert call.function.name == "place"
        assert any(city in call.function.arguments for city in CITIES)
        chunks = list(litellm.completion(**given, **FORCED, messages=MESSAGES, stream=True))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert any(city in call.function.arguments for city in CITIES)


def check_a_schema():
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    reply = litellm.completion(**OPENAI, messages=MESSAGES, max_tokens=80, response_format=form)
    assert any(city in reply.choices[0].message.content for city in CITIES)


def check_responses():
    whole = litellm.responses(**OPENAI, input="where?", max_output_tokens=12)
    assert whole.usage.output_tokens > 0
    kinds = [event.type for event in litellm.responses(**OPENAI, input="where?", max_output_tokens=12, stream=True)]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def check_a_completion():
    reply = litellm.text_completion(
        **{**OPENAI, "model": f"text-completion-openai/{MODEL}"}, prompt="import os", max_tokens=8
    )
    assert reply.usage.completion_tokens > 0


async def check_messages_over_chats_and_responses():
    """Its own /v1/messages in front of OpenAI's API, as its proxy has it."""
    for given in (OPENAI, HOSTED, ANTHROPIC):
        asked = {key: value for key, value in given.items() if key != "num_retries"}
        reply = await litellm.anthropic_messages(
            **asked,
            messages=MESSAGES[1:],
            max_tokens=80,
            tools=[{"name": "place", "input_schema": SCHEMA}],
            tool_choice={"type": "tool", "name": "place"},
        )
        assert [block["input"]["city"] in CITIES for block in reply["content"] if block["type"] == "tool_use"] == [True]


def check_a_context_that_is_too_long_is_known_as_that():
    for given in (OPENAI, HOSTED):
        try:
            litellm.completion(**given, messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=8)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(given["model"])


run(globals())
