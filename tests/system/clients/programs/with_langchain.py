"""langchain-openai: completions, also in batches; chats, streams, tools and typed output, by both of OpenAI's APIs."""

from typing import Literal

from checks import CITIES, KEY, MODEL, URL, run
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Place(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


GIVEN = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
chat = ChatOpenAI(**GIVEN, max_tokens=60, stream_usage=True)
responses = ChatOpenAI(**GIVEN, max_tokens=60, use_responses_api=True)


def check_completions_in_a_batch():
    llm = OpenAI(**GIVEN, max_tokens=8, batch_size=4)
    result = llm.generate(["import os", "def f(", "class A"])
    assert [len(each) for each in result.generations] == [1, 1, 1]
    assert result.llm_output["token_usage"]["completion_tokens"] > 0


def check_a_completion_streams():
    assert list(OpenAI(**GIVEN, max_tokens=8).stream("import os"))


def check_a_chat():
    for model in (chat, responses):
        reply = model.invoke([("system", "be brief"), ("human", "import os")])
        assert reply.usage_metadata["output_tokens"] > 0
        assert reply.usage_metadata["input_tokens"] > 0


def check_a_stream_is_a_whole():
    for model in (chat, responses):
        whole = None
        for chunk in model.stream("import os"):
            whole = chunk if whole is None else whole + chunk
        assert whole.usage_metadata["output_tokens"] > 0


def check_a_batch_of_chats():
    assert len(chat.batch(["import os", "def f("], {"max_concurrency": 2})) == 2


def check_a_call_that_is_forced():
    for model in (chat, responses):
        for choice in ("any", "Place"):
            forced = model.bind_tools([Place], tool_choice=choice, parallel_tool_calls=False)
            (call,) = forced.invoke("where?").tool_calls
            assert (call["name"], call["args"]["city"] in CITIES) == ("Place", True)
            (streamed,) = sum_of(forced.stream("where?")).tool_calls
            assert (streamed["name"], streamed["args"]["city"] in CITIES) == ("Place", True)


def check_calls_come_back():
    for model in (chat, responses):
        forced = model.bind_tools([Place], tool_choice="any", parallel_tool_calls=False)
        called = forced.invoke("where?")
        result = {"role": "tool", "tool_call_id": called.tool_calls[0]["id"], "content": "rain"}
        again = model.bind_tools([Place]).invoke([("human", "where?"), called, result])
        assert again.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


def check_structured_output():
    for model in (chat, responses):
        for method in ("json_schema", "function_calling"):
            place = model.with_structured_output(Place, method=method).invoke("where?")
            assert place.city in CITIES


def check_log_probabilities():
    reply = chat.bind(logprobs=True, top_logprobs=2).invoke("import os")
    assert reply.response_metadata["logprobs"]["content"]


def sum_of(chunks):
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


run(globals())
