"""An encoder-decoder pair over Ray, with a draft that has learned the same task: outputs, gain and beam search."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from served import each, server
from transformers import AutoModelForSeq2SeqLM

from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from outrider_client import Client
from protos.outrider.v1 import generation_pb2 as pb
from tests.checkpoints import EOS
from tests.spoken_digits import ids_of, some_digits, spelled, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 40
SOURCES = [some_digits(dice) for dice in [random.Random(99)] for _ in range(16)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return train(tmp_path_factory.mktemp("target"), num_layers=2, width=64, num_steps=900)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return train(tmp_path_factory.mktemp("draft"), num_layers=1, width=32, num_steps=900)


@pytest.fixture(scope="module")
def running(target, draft):
    config = ServiceConfig(
        TargetConfig(EngineConfig(str(target), deterministic=True)),
        DraftConfig(EngineConfig(str(draft), deterministic=True)),
        speculation=SpeculationConfig(policy="static", max_draft_tokens=4, draft_timeout_s=30.0, breaker_rounds=1000),
    )
    with server(config) as found:
        yield found


@pytest.fixture(scope="module")
def model(target):
    return AutoModelForSeq2SeqLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()


def generate(model, source, **settings):
    ids = torch.tensor([ids_of(source)])
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **settings,
        )


def without_padding(tokens):
    tokens = tokens[1:].tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def asked(source, **fields):
    return pb.GenerateRequest(
        source=source,
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=NUM_TOKENS),
        **fields,
    )


async def test_outputs_are_those_of_generate_in_fewer_passes(running, model):
    want = [without_padding(generate(model, source).sequences[0]) for source in SOURCES]
    async with running.channel() as channel:
        stub = running.stub(channel)
        replies = [reply async for reply in each(8, [lambda s=source: stub.Generate(asked(s)) for source in SOURCES])]
    assert [list(reply.token_ids) for reply in replies] == want
    num_right = sum(reply.text == spelled(source) for source, reply in zip(SOURCES, replies, strict=True))
    assert num_right >= len(SOURCES) // 2, "it has learned to spell"
    num_passes = sum(reply.finish.speculation.target_passes for reply in replies)
    assert sum(map(len, want)) >= 1.5 * num_passes


async def test_beams_are_those_of_generate_in_fewer_passes(running, model):
    settings = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True}
    beams = pb.BeamParams(beam_width=3, length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_WHEN_FULL)
    num_tokens = num_passes = 0
    async with running.channel() as channel:
        stub = running.stub(channel)
        for source in SOURCES[:4]:
            want = generate(model, source, **settings)
            reply = await stub.Generate(asked(source, beams=beams, n=2))
            assert [list(each.token_ids) for each in reply.samples] == [*map(without_padding, want.sequences)]
            scores = [each.finish.score for each in reply.samples]
            assert scores == pytest.approx(want.sequences_scores.tolist(), abs=1e-4)
            num_tokens += max(len(each.token_ids) for each in reply.samples)
            num_passes += reply.samples[0].finish.speculation.target_passes
    assert num_passes < num_tokens


def test_the_command_reads_a_source(running):
    command = [sys.executable, "-m", "outrider", "generate", "--source", SOURCES[0], "--temperature", "0"]
    done = subprocess.run([*command, "--address", running.address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with Client(running.address) as client:
        assert done.stdout == client.generate(source=SOURCES[0], temperature=0.0).text + "\n"
