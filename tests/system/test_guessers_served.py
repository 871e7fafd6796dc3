"""Every name of `speculation.guessers`, by gRPC: the tokens are those of plain decoding, greedy and seeded. A template
is what plain decoding has output."""

from __future__ import annotations

import asyncio
import json
import re

import grpc
import pytest
from test_served import assert_nothing_is_held

from orchestrator.guessers import HEAD, SOURCES
from protos.outrider.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.ray, pytest.mark.ci, pytest.mark.timeout(300)]

NAMES = tuple(name for name in SOURCES if name != HEAD)  # the target has no head
WAYS = [*((name,) for name in NAMES), NAMES]
SAMPLINGS = {"greedy": pb.SamplingParams(temperature=0.0), "seeded": pb.SamplingParams(temperature=0.8, seed=11)}
ROW = {
    "type": "object",
    "properties": {"name": {"enum": ["alice", "bob"]}, "is_done": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
    "required": ["name", "is_done", "level"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ROW, "minItems": 5, "maxItems": 5}
FORMS = {"free": None, "held": pb.StructuredOutput(json_schema=json.dumps(SCHEMA))}
MAY_BE_SILENT = {"free": ("grammar",), "held": ("retrieval",)}
"""Nothing is forced where no grammar is, and the corpus of the index is code."""
PROMPT = "import os\nimport sys\n\n" * 4


def request(sampling, form, **speculation):
    return pb.GenerateRequest(
        text=PROMPT,
        sampling=sampling,
        stopping=pb.StoppingParams(max_tokens=96, ignore_eos=form is None),
        structured_output=form,
        speculation=pb.SpeculationParams(policy="static_tree", **speculation),
    )


async def complete(stub, job):
    """The tokens, their text, and how many guesses of each source were verified."""
    chunks = [chunk async for chunk in stub.GenerateStream(job)]
    sources = chunks[-1].finish.speculation.sources
    assert not any(source.failures for source in sources)
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        "".join(chunk.text for chunk in chunks),
        {source.name: source.drafted_tokens for source in sources},
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_tokens_are_those_of_plain_decoding_whoever_guesses(running, sampling, form):
    """Each alone and all together, all at once."""
    given = (SAMPLINGS[sampling], FORMS[form])
    async with running.channel() as channel:
        stub = running.stub(channel)
        plain, text, verified = await complete(stub, request(*given, max_draft_tokens=0))
        assert len(plain) > 40
        assert not verified
        template = re.escape(text)
        jobs = [request(*given, guessers=way, template=template if "template" in way else None) for way in WAYS]
        found = await asyncio.gather(*[complete(stub, job) for job in jobs])
    for way, (tokens, _, verified) in zip(WAYS, found, strict=True):
        assert tokens == plain, way
        assert set(verified) <= set(way)
        assert any(verified.values()) or way == MAY_BE_SILENT[form], way
    await assert_nothing_is_held(running)


async def test_a_template_that_does_not_compile_is_refused_by_its_name_and_its_neighbour_goes_on(running):
    given = (SAMPLINGS["greedy"], None)
    async with running.channel() as channel:
        stub = running.stub(channel)
        plain, text, _ = await complete(stub, request(*given, max_draft_tokens=0))
        neighbour = asyncio.create_task(complete(stub, request(*given, template=re.escape(text))))
        for bad in ("(a", "", "(?=a)b", "a" * 70_000):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await complete(stub, request(*given, template=bad))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details().startswith("speculation.template: ")
        tokens, _, _ = await neighbour
    assert tokens == plain
    await assert_nothing_is_held(running)
