"""Encoder-decoders through real engines and sessions: outputs depend on source, prefix, parameters and seed alone."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from local import noisy_copy, request, system
from wild import PATIENT, WildPolicies

from core.config import SpeculationConfig
from core.records import Sampling, Verification
from tests import checkpoints
from workers.engine.target import TargetEngine

START = 0
SIZES = (1, 15, 16, 40, 61)
"""Lengths of sources: within a block, at its end, and over several."""
NUM_TOKENS = 24
SEEDED = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.3, seed=5)
GREEDY = Sampling(temperature=0.0)


def a_source(number, size):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, checkpoints.VOCAB_SIZE - 1, (size,), generator=generator).tolist()


SOURCES = [a_source(number, size) for number, size in enumerate(SIZES)]


def asked(source, prefix=(), **changes):
    return request([*source, START, *prefix], NUM_TOKENS, num_source=len(source), **changes)


@pytest.fixture(scope="module", params=["mt5", "bart"])
def pair(request, tmp_path_factory):
    target = checkpoints.write(request.param, tmp_path_factory.mktemp("target"))
    return target, noisy_copy(target, tmp_path_factory.mktemp("draft"))


MOSTLY_MT5 = pytest.mark.parametrize(
    "pair", ["mt5", pytest.param("bart", marks=pytest.mark.slow)], indirect=True, scope="module"
)
"""For tests of sessions, to which all encoder-decoders are alike."""


async def outputs(target, draft, requests, **settings):
    """The output of each request; all at once."""
    async with system(target, draft, **settings) as running:
        found = await running.all_tokens(requests)
        await running.check_nothing_is_held()
    return found


@pytest.fixture(scope="module")
def plain(pair):
    """Outputs without a draft, each alone."""
    requests = [asked(source, sampling=sampling) for source in SOURCES for sampling in (GREEDY, SEEDED)]

    async def one_by_one():
        async with system(pair[0], None) as running:
            return [await running.tokens(each) for each in requests]

    return requests, asyncio.run(one_by_one())


def test_greedy_outputs_are_those_of_generate(pair, plain):
    requests, found = plain
    model = checkpoints.build(json.loads((pair[0] / "config.json").read_text())["model_type"])
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = list(range(checkpoints.VOCAB_SIZE, model.config.vocab_size))
    for each, tokens in zip(requests, found, strict=True):
        if each.sampling.is_greedy:
            ids = torch.tensor([each.prompt[: each.num_source]])
            mask = torch.ones_like(ids)
            want = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
            assert tokens == want[0, 1:].tolist()


def test_sources_decide(plain):
    requests, found = plain
    seeded = [tuple(tokens) for each, tokens in zip(requests, found, strict=True) if not each.sampling.is_greedy]
    assert len(set(seeded)) == len(SOURCES)


@pytest.mark.parametrize("block_tokens", [4, pytest.param(16, marks=pytest.mark.slow)])
async def test_drafting_changes_nothing(pair, plain, block_tokens):
    requests, want = plain
    assert await outputs(*pair, requests, block_tokens=block_tokens) == want


async def test_trees_change_nothing(pair, plain):
    requests, want = plain
    speculation = SpeculationConfig(policy="static_tree", max_draft_tokens=4, draft_timeout_s=30.0)
    assert await outputs(*pair, requests, speculation=speculation) == want


@MOSTLY_MT5
async def test_policies_that_decide_by_dice_change_nothing(pair, plain):
    requests, want = plain
    assert await outputs(*pair, requests, policies=WildPolicies(seed=7), speculation=PATIENT) == want


@MOSTLY_MT5
@pytest.mark.parametrize("family", ["t5", pytest.param("marian", marks=pytest.mark.slow), "llama"])
async def test_a_draft_of_another_architecture_changes_nothing(pair, plain, family, tmp_path):
    """A decoder reads the source as the beginning of its text."""
    requests, want = plain
    assert await outputs(pair[0], checkpoints.write(family, tmp_path, seed=3), requests) == want


@MOSTLY_MT5
async def test_little_memory_changes_nothing(pair, plain):
    """Sessions are preempted, and compute their text again, with the source."""
    requests, want = plain
    assert await outputs(*pair, requests, kv_cache_tokens=160, block_tokens=4) == want


async def test_small_steps_change_nothing(pair, plain):
    """Sources are read in parts."""
    requests, want = plain
    assert await outputs(*pair, requests, max_step_tokens=16, prefill_chunk_tokens=7) == want


@MOSTLY_MT5
@pytest.mark.parametrize("name", ["target", "draft"])
async def test_a_crash_changes_nothing(pair, plain, name):
    """The source travels with the session's text to the next engine."""
    requests, want = plain
    async with system(*pair) as running:
        streams = asyncio.gather(*map(running.tokens, requests))
        await asyncio.sleep(0.3)
        old = running.leases.engines[name]
        kind = type(old)
        extra = () if kind is TargetEngine else (64,)
        await running.leases.replace_engine(name, kind.load(old._config, 9, *extra, lambda _: None))
        assert await streams == want
        await running.check_nothing_is_held()


async def test_equal_texts_of_different_sources_share_nothing(pair):
    """Sources that begin alike, and one prefix: neither keys of the source nor those of the text are another's."""
    prefix = a_source(99, 36)
    sources = [SOURCES[3], [*SOURCES[3][:-1], 7], [7, *SOURCES[3][1:]], SOURCES[3][:32]]
    requests = [asked(source, prefix) for source in sources for _ in range(2)]
    async with system(pair[0], None, share_prefixes=False) as running:
        want = [await running.tokens(each) for each in requests]
    async with system(pair[0], None, block_tokens=4) as running:
        assert [await running.tokens(each) for each in requests] == want
        stats = await running.leases.loops["target"].ask(lambda engine: engine.stats())
        passes = await running.leases.loops["target"].ask(lambda engine: engine._runtime._sources.num_passes)
    assert stats.num_adopted_tokens >= 4 * 64, "the second of each adopts what the first has computed"
    assert passes == len(sources)


@MOSTLY_MT5
@pytest.mark.parametrize("rule", [Verification.REJECTION, Verification.RECURSIVE_REJECTION, Verification.TYPICAL])
async def test_other_rules_serve_sources_too(pair, rule):
    sampled = [asked(source, sampling=SEEDED, verification=rule) for source in SOURCES]
    found = await outputs(*pair, sampled)
    assert [len(tokens) for tokens in found] == [NUM_TOKENS] * len(SOURCES)


async def test_a_draft_with_its_own_encoder_is_mostly_right(pair):
    """A draft that is the target itself: all its guesses stand only if it reads the source, too."""
    async with system(pair[0], pair[0], gamma=4, is_patient=True) as running:
        chunks = await running.complete(asked(SOURCES[3]))
    statistics = chunks[-1].stats
    assert statistics.num_drafted_tokens > 0
    assert statistics.num_accepted_tokens >= 0.8 * statistics.num_drafted_tokens, "the last block may be cut"
