"""openai-agents: agents by responses and by chats; tools that are called and answered, typed output, streams."""

import os
from dataclasses import replace
from typing import Literal

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import CITIES, KEY, MODEL, URL, run
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel, ConfigDict

set_tracing_disabled(True)


class Place(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


asked = []


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """How the weather is."""
    asked.append(city)
    return "rain"


def models():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)


ENDED = {"stop": ["(", ")", "#", "=", "."]}
"""It takes an output that was cut by its length for an error, and the model hardly ends by itself."""
SHORT = ModelSettings(max_tokens=200, temperature=0.0, include_usage=True, extra_body=ENDED)
YES = replace(SHORT, extra_body={"guided_choice": ["yes", "no"]})


async def check_text():
    for model in models():
        result = await Runner.run(Agent("A", instructions="be brief", model=model, model_settings=YES), "import os")
        assert result.context_wrapper.usage.output_tokens > 0


async def check_a_stream():
    for model in models():
        result = Runner.run_streamed(Agent("A", model=model, model_settings=YES), "import os")
        kinds = {event.data.type async for event in result.stream_events() if event.type == "raw_response_event"}
        assert {"response.output_text.delta", "response.completed"} <= kinds


async def check_typed_output():
    for model in models():
        agent = Agent("A", model=model, model_settings=SHORT, output_type=Place)
        result = await Runner.run(agent, "where?")
        assert result.final_output.city in CITIES


async def check_a_tool_is_called_and_answered():
    """The call is forced once; what follows is the model's answer to the tool's."""
    forced = replace(SHORT, tool_choice="required", parallel_tool_calls=False)
    for model in models():
        for streamed in (False, True):
            asked.clear()
            agent = Agent("A", model=model, model_settings=forced, tools=[weather])
            if streamed:
                result = Runner.run_streamed(agent, "weather?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, "weather?")
            assert asked, "the tool was called"
            assert set(asked) <= set(CITIES)
            assert len(result.raw_responses) == 2


async def check_what_reasoning_models_are_asked():
    """It asks for thoughts that it can send back."""
    reasoning = Reasoning(summary="auto")
    thinking = replace(YES, store=False, reasoning=reasoning, response_include=["reasoning.encrypted_content"])
    result = await Runner.run(Agent("A", model=models()[0], model_settings=thinking), "import os")
    again = [*result.to_input_list(), {"role": "user", "content": "and?"}]
    assert (await Runner.run(Agent("A", model=models()[0], model_settings=thinking), again)).raw_responses


run(globals())
