"""`best_of` over samples: all are computed and counted, and those with the largest mean log probability come back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from test_http_servicer import CHAT, call, usage, whole, with_template

from core.records import Chunk, FinishReason, GenerationRequest, TokenLogprobs, Usage
from deploy.api import sample_seed
from tests.deploy.grpc.rpc import Script, ids_of

SCORES = ((-3.0,), (-1.0, -1.0, -1.5), (-0.5,), (-2.0, -0.1), (-4.0,), (-0.25,))
"""Log probabilities of each sample. The sum of the second is less than that of the first, its mean is larger."""

SEEDS = [sample_seed(5, index) for index in range(4)]


class Scored(Script):
    """Sample i has the i-th scores; the samples of the prompt "b" those after the first three."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        number = SEEDS.index(request.sampling.seed) + 3 * (request.prompt[-1:] == ids_of("b"))
        logprobs = tuple(map(TokenLogprobs, SCORES[number]))
        ids, size = tuple(range(7, 7 + len(logprobs))), len(logprobs)
        yield Chunk(f"text {number}", ids, (False,) * size, Usage(3, size), logprobs, FinishReason.LENGTH)


async def answered(script: Scored, **fields: Any) -> dict[str, Any]:
    status, body = await whole(with_template(script), call(**{"seed": 5, **fields}))
    assert status == 200
    return body


async def test_the_best_come_back_best_first_each_with_its_own_seed() -> None:
    script = Scored()
    body = await answered(script, best_of=4, n=2)
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "text 2"), (1, "text 3")]
    assert [each["outrider"]["seed"] for each in body["choices"]] == SEEDS[2:]
    assert [request.sampling.seed for request in script.requests] == SEEDS


async def test_all_that_was_computed_counts_and_nothing_is_shown_that_was_not_asked_for() -> None:
    body = await answered(Scored(), best_of=4)
    assert body["usage"] == usage(3, 1 + 3 + 1 + 2)
    (choice,) = body["choices"]
    assert choice["logprobs"] is None
    (choice,) = (await answered(Scored(), best_of=4, logprobs=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]


async def test_each_prompt_has_its_best() -> None:
    body = await answered(Scored(), prompt=["a", "b"], best_of=3, echo=True)
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "atext 2"), (1, "btext 5")]


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 2}, {"best_of": None, "n": 2}])
async def test_as_many_as_are_returned_are_not_ranked(fields: dict[str, Any]) -> None:
    script = Scored()
    body = await answered(script, **fields)
    assert [each["text"] for each in body["choices"]] == ["text 0", "text 1"]
    assert {request.num_logprobs for request in script.requests} == {None}


async def test_a_chat_has_it_too() -> None:
    body = await answered(Scored(), path=CHAT, messages=[{"role": "user", "content": "say"}], best_of=3)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "text 2"
