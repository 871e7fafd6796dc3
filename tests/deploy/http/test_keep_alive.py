"""Comments on silent streams: when they come, and what they may not change."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from core.config import HttpConfig
from core.errors import ConfigError, Unavailable
from deploy.api import merged
from deploy.http.wire import COMMENT, Head
from tests.deploy.grpc.rpc import Script, greeting
from tests.deploy.http.clients import by_anthropic, by_openai, said, servicer
from tests.deploy.http.test_http_servicer import call, events

MESSAGES = "/v1/messages"


def silent(script, keep_alive_s):
    """Endpoints whose streams get a comment after so many seconds."""
    return servicer(script, http=HttpConfig(keep_alive_s=keep_alive_s))


class Held(Script):
    """Gives nothing until it is let go."""

    def __init__(self, *steps):
        super().__init__(*steps)
        self.is_free = asyncio.Event()

    async def generate(self, request):
        await self.is_free.wait()
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


async def begun(script, parts):
    """The parts up to the first comment; then the script is let go."""
    head, comment = await anext(parts), await anext(parts)
    assert isinstance(head, Head)
    assert (head.status, comment) == (200, COMMENT)
    script.is_free.set()


async def test_a_stream_that_is_silent_gets_its_head_and_comments_and_then_the_same_events():
    script = Held(*greeting())
    async with aclosing(silent(script, 0.01).respond(call(stream=True, seed=7))) as parts:
        await begun(script, parts)
        body = b"".join([part async for part in parts]).replace(COMMENT, b"")
    shown = [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n")[:-2]]
    usual = await events(servicer(Script(*greeting())), call(stream=True, seed=7))
    assert [each["choices"] for each in shown] == [each["choices"] for each in usual]


@pytest.mark.parametrize(("path", "kind"), [("/v1/completions", "server_error"), (MESSAGES, "overloaded_error")])
async def test_an_error_after_a_comment_is_an_event(path, kind):
    script = Held(Unavailable("lost"))
    fields = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]} if path == MESSAGES else {}
    async with aclosing(silent(script, 0.01).respond(call(path, stream=True, **fields))) as parts:
        await begun(script, parts)
        *_, last = [part async for part in parts if part != COMMENT]
    (data,) = [line for line in last.decode().splitlines() if line.startswith("data: ")]
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == (kind, "lost")


@pytest.mark.parametrize("clients", [by_openai, by_anthropic])
async def test_official_clients_skip_comments(clients):
    script = Held(*said("hel", "lo"))
    asyncio.get_running_loop().call_later(0.05, script.is_free.set)
    given = {"model": "pair", "max_tokens": 5, "messages": [{"role": "user", "content": "say"}]}
    async with clients(script, http=HttpConfig(keep_alive_s=0.01)) as client:
        if clients is by_openai:
            stream = await client.chat.completions.create(**given, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        else:
            async with client.messages.stream(**given) as stream:
                texts = [text async for text in stream.text_stream]
    assert "".join(texts) == "hello"


async def test_without_a_limit_nothing_is_sent_before_the_first_piece():
    script = Held(Unavailable("lost"))
    asyncio.get_running_loop().call_later(0.05, script.is_free.set)
    head, *_ = [part async for part in silent(script, 0.0).respond(call(stream=True))]
    assert head.status == 503


async def test_a_client_that_goes_away_in_silence_closes_the_stream():
    script = Script(is_endless=True)
    async with aclosing(silent(script, 0.01).respond(call(stream=True, seed=7))) as parts:
        assert [type(await anext(parts)) for _ in range(3)] == [Head, bytes, bytes]
    assert (script.num_open, script.num_closed) == (0, 1)


async def test_pieces_stay_in_order_and_at_most_two_are_taken_ahead():
    taken = []

    async def numbers():
        for number in range(6):
            taken.append(number)
            yield number

    async with aclosing(merged([numbers()])) as pieces:
        assert await anext(pieces) == 0
        for _ in range(20):  # all that would be taken ahead
            await asyncio.sleep(0)
        assert taken == [0, 1, 2]
        assert [piece async for piece in pieces] == [1, 2, 3, 4, 5]


async def test_pieces_whose_end_fails_do_not_hold_up_a_client_that_goes_away():
    async def numbers():
        try:
            for number in range(6):
                yield number
        finally:
            raise RuntimeError("an end that fails")

    async with asyncio.timeout(10):
        async with aclosing(merged([numbers()])) as pieces:
            assert await anext(pieces) == 0
            await asyncio.sleep(0.01)  # the next one is in the queue, and one more waits for its place


@pytest.mark.parametrize("keep_alive_s", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(keep_alive_s):
    with pytest.raises(ConfigError, match="keep_alive_s must be finite and at least 0"):
        HttpConfig(keep_alive_s=keep_alive_s)
