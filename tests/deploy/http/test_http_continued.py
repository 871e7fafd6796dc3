"""Chats whose last message is continued, scored prompts of chats, and what a stream need not say."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from core.records import TokenLogprobs
from tests.deploy.grpc.rpc import TOKENIZER, Script
from tests.deploy.http.clients import by_openai, said, text_of_prompt

USER = {"role": "user", "content": "say"}
BEGUN = {"role": "assistant", "content": "The"}


async def created(script, *messages, **fields):
    async with by_openai(script) as client:
        given = {"model": "pair", "messages": [*messages], "stream": fields.pop("stream", False)}
        return await client.chat.completions.create(**given, extra_body=fields)


@pytest.mark.parametrize("also", [{}, {"add_generation_prompt": False}])
async def test_the_last_message_is_continued_where_that_is_asked(also):
    script = Script(*said(" sky"))
    reply = await created(script, USER, BEGUN, continue_final_message=True, **also)
    assert (text_of_prompt(script), reply.choices[0].message.content) == ("user:say;assistant:The", " sky")


async def test_it_is_an_answer_before_the_next_one_where_it_is_not():
    script = Script(*said("Yes"))
    await created(script, USER, BEGUN)
    assert text_of_prompt(script) == "user:say;assistant:The;"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_continued_may_be_repeated(stream):
    script = Script(*said(" sky", " is"))
    reply = await created(script, USER, BEGUN, continue_final_message=True, echo=True, stream=stream)
    if stream:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in reply]) == "The sky is"
    else:
        assert reply.choices[0].message.content == "The sky is"


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED = [
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    (
        {"continue_final_message": True, "messages": [USER, {**BEGUN, "tool_calls": [CALLED]}]},
        "messages[1].tool_calls",
    ),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(each[0]) for each in REFUSED])
async def test_a_bad_value_is_refused_by_its_name(fields, param):
    async with by_openai(Script()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/chat/completions", body={"messages": [USER, BEGUN], **fields}, cast_to=object)
    assert refused.value.param == param


async def test_a_prompt_of_a_chat_is_scored():
    num_prompt = len(TOKENIZER.encode("user:say;", add_special_tokens=False))
    scores = (TokenLogprobs(-1.0, ((7, -0.25), (8, -0.5))),) * (num_prompt - 1)
    (chunk,) = said("yes")
    script = Script(replace(chunk, prompt_logprobs=scores))
    reply = await created(script, USER, prompt_logprobs=2)
    assert script.requests[0].num_prompt_logprobs == 2
    first, *others = reply.prompt_logprobs
    assert (first, len(others)) == (None, num_prompt - 1)
    for token_id, entries in zip(script.requests[0].prompt[1:], others, strict=True):
        assert {(i, entries[i]["rank"]) for i in entries} >= {("7", 1), ("8", 2)}
        assert entries[str(token_id)]["decoded_token"] == TOKENIZER.decode([token_id])
        assert str(token_id) in ("7", "8") or entries[str(token_id)]["rank"] is None


async def pieces(*texts, **fields):
    chunks = [chunk.choices[0] async for chunk in await created(Script(*said(*texts)), USER, stream=True, **fields)]
    return [(choice.delta.model_dump(exclude_unset=True), choice.finish_reason) for choice in chunks]


async def test_a_piece_that_says_nothing_is_not_sent():
    """A character or a mark may not be whole yet. The first piece has the role, the last one why it ended."""
    expected = [({"role": "assistant", "content": "a"}, None), ({"content": "b"}, None), ({}, "stop")]
    assert await pieces("a", "", "b", "") == expected
    thoughts = [delta for delta, _ in await pieces("<think>", "hm", "</thi", "nk>", "yes")]
    assert thoughts == [
        {"role": "assistant"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "yes"},
    ]


async def test_a_piece_without_text_that_is_a_token_is_sent_where_tokens_are_asked_for():
    (chunk,) = said("a")
    silent = replace(chunk, text="", finish_reason=None)
    reply = await created(Script(silent, silent, chunk), USER, stream=True, return_token_ids=True)
    assert len([each async for each in reply]) == 3
