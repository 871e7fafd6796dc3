"""An unknown guesser is refused by its place in the list, and a stream beside it goes on."""

from __future__ import annotations

import asyncio

import pytest

from outrider_client import Client, InvalidRequest
from tests.deploy.grpc.rpc import Script, greeting, server


class Pausing(Script):
    """Goes on after its first piece when it is told to."""

    def __init__(self):
        super().__init__(*greeting())
        self.may_go_on = asyncio.Event()

    async def generate(self, request):
        self.loop = asyncio.get_running_loop()
        async for chunk in super().generate(request):
            yield chunk
            await self.may_go_on.wait()


@pytest.mark.parametrize(
    ("guessers", "field", "problem"),
    [
        (["draft", "oracle"], "speculation.guessers[1]", "must be one of draft, prompt_lookup, .*, got 'oracle'"),
        (["retrieval"], "speculation.guessers[0]", "must be one of draft, prompt_lookup, .*, got 'retrieval'"),
        (["suffix", "suffix"], "speculation.guessers[1]", "another name than those before"),
    ],
)
def test_it_is_named_and_costs_no_neighbour_anything(guessers, field, problem):
    script = Pausing()
    with server(script) as address, Client(address) as client, client.stream("say", guessers=["draft"]) as neighbour:
        assert next(neighbour).text == "hello"
        for prompt in ("say", "say more"):
            with pytest.raises(InvalidRequest, match=problem) as caught:
                client.generate(prompt, guessers=guessers)
            assert caught.value.field == field
        script.loop.call_soon_threadsafe(script.may_go_on.set)
        assert [chunk.text for chunk in neighbour] == [" word"]
    assert [request.guessers for request in script.requests] == [("draft",)]
