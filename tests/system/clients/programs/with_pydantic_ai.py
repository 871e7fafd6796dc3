"""pydantic-ai: agents by chats, by responses and by Anthropic's messages; tools, typed output, streams."""

from typing import Literal

from checks import CITIES, KEY, MODEL, URL, run
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Place(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
MODELS = (
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
)
SETTINGS = ModelSettings(max_tokens=80, temperature=0.0)


def check_text():
    for model in MODELS:
        result = Agent(model, model_settings=SETTINGS, instructions="be brief").run_sync("import os")
        assert result.usage.output_tokens > 0
        assert result.usage.input_tokens > 0


async def check_a_stream():
    for model in MODELS:
        async with Agent(model, model_settings=SETTINGS).run_stream("import os") as result:
            assert [text async for text in result.stream_text(delta=True)]
        assert result.usage.output_tokens > 0


def check_typed_output():
    for model in MODELS:
        # Of Anthropic's models it lists by name those that take a schema.
        outputs = [ToolOutput(Place)] if isinstance(model, AnthropicModel) else [ToolOutput(Place), NativeOutput(Place)]
        for output in outputs:
            result = Agent(model, model_settings=SETTINGS, output_type=output).run_sync("where?")
            assert result.output.city in CITIES


async def check_typed_output_streams():
    for model in MODELS:
        async with Agent(model, model_settings=SETTINGS, output_type=ToolOutput(Place)).run_stream("where?") as result:
            assert (await result.get_output()).city in CITIES


def check_history_goes_back():
    for model in MODELS:
        agent = Agent(model, model_settings=SETTINGS, output_type=ToolOutput(Place))
        first = agent.run_sync("where?")
        second = agent.run_sync("and where?", message_history=first.all_messages())
        assert second.output.city in CITIES


run(globals())
