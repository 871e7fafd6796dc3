"""How much a model is to think: given to the chat template that knows it, refused by the body's field elsewhere."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.deploy.grpc.rpc import TOKENIZER, Script
from tests.deploy.http.clients import TEMPLATE, by_anthropic, by_openai, said
from tests.vocabularies import as_product, byte_level

OSS = (
    TEMPLATE
    + "{% if not reasoning_effort %}{% set reasoning_effort = 'usual' %}{% endif %}Reasoning: {{ reasoning_effort }}"
)
"""As gpt-oss has it: the name is set where it is not given."""
HELLO = [{"role": "user", "content": "say"}]


def test_a_template_says_which_arguments_it_looks_for():
    def variables(template):
        return as_product(byte_level(), template).template_variables

    assert "reasoning_effort" in variables(OSS)
    assert "reasoning_effort" in variables("{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}")
    assert {"enable_thinking", "messages"} <= variables(TEMPLATE)
    assert "reasoning_effort" not in variables(TEMPLATE)
    assert "reasoning_effort" not in variables("reasoning_effort {# reasoning_effort #}{{ messages }}")
    assert variables(None) == frozenset()


async def prompts(template, effort, **kwargs):
    """The prompts of the three bodies with this effort."""
    script, extra = Script(*said("yes")), {"extra_body": {"chat_template_kwargs": kwargs}} if kwargs else {}
    async with by_openai(script, template=template) as client:
        given = {"model": "pair", "messages": HELLO}
        await client.chat.completions.create(**given, reasoning_effort=effort, **extra)
        response = await client.responses.create(model="pair", input="say", reasoning={"effort": effort}, **extra)
    assert response.reasoning.effort == effort
    if effort != "none":  # Anthropic has no such effort
        async with by_anthropic(script, template=template) as client:
            given = {**given, "output_config": {"effort": effort}, **extra}
            await client.messages.create(**given, max_tokens=50)
            count = await client.messages.count_tokens(**given)
        assert count.input_tokens == len(script.requests[0].prompt)
    return {TOKENIZER.decode(request.prompt) for request in script.requests}


async def test_a_template_that_knows_an_effort_is_given_it():
    assert await prompts(OSS, "high") == {"user:say;Reasoning: high"}
    assert await prompts(OSS, "high", reasoning_effort="mine") == {"user:say;Reasoning: mine"}
    assert await prompts(OSS, "none") == {"user:say;quickReasoning: none"}


async def test_no_effort_is_no_thinking_in_every_template():
    assert await prompts(TEMPLATE, "none") == {"user:say;quick"}
    assert await prompts(TEMPLATE, "none", enable_thinking=True) == {"user:say;"}


@pytest.mark.parametrize(
    ("budget", "effort"), [(1_024, "low"), (4_999, "low"), (5_000, "medium"), (10_000, "high"), (60_000, "high")]
)
async def test_a_budget_for_thinking_is_an_effort_where_the_template_knows_one(budget, effort):
    given = {
        "model": "pair",
        "max_tokens": 50,
        "messages": HELLO,
        "thinking": {"type": "enabled", "budget_tokens": budget},
    }
    for template, shown in (
        (OSS, f"user:say;Reasoning: {effort}"),
        (TEMPLATE + "{{ enable_thinking }}", "user:say;True"),
    ):
        script = Script(*said("yes"))
        async with by_anthropic(script, template=template) as client:
            await client.messages.create(**given)
        assert TOKENIZER.decode(script.requests[0].prompt) == shown
    script = Script(*said("yes"))
    async with by_anthropic(script, template=OSS) as client:
        await client.messages.create(**given, output_config={"effort": "low"})
    assert TOKENIZER.decode(script.requests[0].prompt) == "user:say;Reasoning: low"


@pytest.mark.parametrize("effort", ["low", "much"])
async def test_an_effort_of_which_nothing_would_come_is_refused_by_its_field(effort):
    said_why = "chat_template_kwargs" if effort == "low" else "must be 'none'"
    async with by_openai(Script()) as client:
        with pytest.raises(openai.BadRequestError, match=said_why) as caught:
            await client.chat.completions.create(model="pair", messages=HELLO, reasoning_effort=effort)
        assert caught.value.param == "reasoning_effort"
        with pytest.raises(openai.BadRequestError, match=said_why) as caught:
            await client.responses.create(model="pair", input="say", reasoning={"effort": effort})
        assert caught.value.param == "reasoning.effort"
    async with by_anthropic(Script()) as client:
        given = {"model": "pair", "max_tokens": 50, "messages": HELLO}
        with pytest.raises(anthropic.BadRequestError, match=rf"output_config\.effort: .*{said_why}"):
            await client.messages.create(**given, output_config={"effort": effort})
