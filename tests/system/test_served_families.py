"""Other architectures over the wire: greedy output is that of transformers, with a draft that is mostly wrong."""

from __future__ import annotations

import pytest
from served import each, server, tokens

from core.config import DraftConfig, EngineConfig, ServiceConfig, TargetConfig
from protos.outrider.v1 import generation_pb2 as pb
from tests.checkpoints import FAMILIES, VOCAB_SIZE, write
from tests.reference import generate

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_PROMPTS, NUM_TOKENS = 40, 64


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
async def test_greedy_output_is_that_of_transformers(tmp_path, family):
    target = write(family, tmp_path / "target", seed=1, vocab_size=VOCAB_SIZE)
    draft = write("llama", tmp_path / "draft", seed=2)
    prompts = [[(7 * n + 3 * k) % (VOCAB_SIZE - 1) for k in range(1 + n)] for n in range(NUM_PROMPTS)]
    expected = [generate(target, prompt, NUM_TOKENS) for prompt in prompts]
    config = ServiceConfig(
        TargetConfig(EngineConfig(str(target), deterministic=True)), DraftConfig(EngineConfig(str(draft)))
    )
    with server(config) as running:
        async with running.channel() as channel:
            stub = running.stub(channel)
            jobs = [lambda p=prompt: tokens(stub, _request(p)) for prompt in prompts]
            assert [output async for output in each(16, jobs)] == expected


def _request(prompt):
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
