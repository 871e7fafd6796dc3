"""Drafting changes no token: against transformers, and against plain decoding, however it is drafted and batched."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from local import DEMO, NEVER_LEFT, request, system
from transformers import AutoModelForCausalLM
from wild import PATIENT, WildPolicies

from core.config import SpeculationConfig
from core.records import Sampling, Verification
from orchestrator.policy.policy import Found
from tests.checkpoints import FAMILIES, VOCAB_SIZE, write
from tests.reference import generate

PROMPTS = [
    "def parse_args(self, args):\n    ",
    "class Path:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "    for key, value in self.items():\n        if",
    "# Copyright",
    "async def main():\n    await",
    'raise ValueError("',
    "while True:\n    try:\n        line = self.readline()\n    except",
]
SHARP = Sampling(temperature=0.3, top_k=40, top_p=0.95, seed=11)
USUAL = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=2**64 - 1)
WILD = Sampling(temperature=1.2, top_k=100, top_p=0.8, seed=5)
PENALISED = Sampling(
    temperature=1.0, seed=3, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1
)


def static(gamma, pipelining):
    return SpeculationConfig(
        policy="static",
        max_draft_tokens=gamma,
        pipelining=pipelining,
        draft_timeout_s=30.0,
        breaker_rounds=NEVER_LEFT,
    )


@pytest.mark.parametrize(
    "speculation",
    [
        static(0, True),
        static(1, True),
        static(4, True),
        static(8, True),
        static(4, False),
        SpeculationConfig(draft_timeout_s=30.0),
        SpeculationConfig(pipelining=False, draft_timeout_s=30.0),
    ],
    ids=lambda config: f"{config.policy} {config.max_draft_tokens} {'pipelined' if config.pipelining else 'in turn'}",
)
async def test_greedy_output_is_that_of_transformers(speculation):
    async with system(speculation=speculation, is_patient=True) as served:
        prompts = [served.tokenizer.encode(text) for text in PROMPTS[:2]]
        found = await asyncio.gather(*[served.complete(request(prompt, 32)) for prompt in prompts])
        for prompt, chunks in zip(prompts, found, strict=True):
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == generate(DEMO / "target", prompt, 32)
            if speculation.policy == "static":  # the adaptive one may rest, as on a busy machine
                assert (chunks[-1].stats.num_accepted_tokens > 0) is (speculation.max_draft_tokens > 0)
        await served.check_nothing_is_held()


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.ci), 0.8])
async def test_whatever_a_policy_does_the_tokens_are_those_of_plain_decoding(temperature):
    """Blocks of any shape, drafts in turn or not, that rest or come too late; six streams at once."""
    policies = WildPolicies(seed=7)
    async with system(speculation=PATIENT, policies=policies) as served:
        jobs = [
            request(served.tokenizer.encode(text), 24, sampling=Sampling(temperature=temperature, seed=number))
            for number, text in enumerate(PROMPTS[:6])
        ]
        expected = await served.all_tokens(replace(job, max_draft_tokens=0) for job in jobs)
        for _ in range(2):
            assert await asyncio.gather(*map(served.tokens, jobs)) == expected
        rounds = [seen for policy in policies.policies for seen in policy.rounds]
        assert {seen.found for seen in rounds} == {Found.HIT, Found.MISS, Found.NOT_ASKED}
        assert any(len(set(seen.shape.parents)) < len(seen.shape) and len(seen.path) > 1 for seen in rounds), "trees"
        await served.check_nothing_is_held()


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
async def test_greedy_output_is_that_of_transformers_for_other_architectures(tmp_path, family):
    """Guessed by a stranger, whose guesses are nearly all wrong, and by the target itself, whose are all right.

    transformers may pick ids that no token has, so this target has none; the stranger has some, and never says them.
    """
    target = write(family, tmp_path / "target", seed=1, vocab_size=VOCAB_SIZE)
    draft = write("llama", tmp_path / "draft", seed=2)
    prompts = [[7, 11, 13], list(range(40)), [5] * 9]
    expected = [generate(target, prompt, 64) for prompt in prompts]
    for guesser in (draft, target):
        async with system(target, guesser, gamma=5) as served:
            jobs = [served.tokens(request(prompt, 64)) for prompt in prompts]
            assert await asyncio.gather(*jobs) == expected
            await served.check_nothing_is_held()


FEW, MANY = (5, (1, 8)), (16, (1, 4, 8))


@pytest.mark.parametrize(
    ("sampling", "num_jobs", "gammas"),
    [(each, *FEW) for each in (USUAL, PENALISED)]
    + [pytest.param(each, *MANY, marks=pytest.mark.ci) for each in (SHARP, USUAL, WILD, PENALISED)],
    ids=lambda value: f"T={value.temperature}" if isinstance(value, Sampling) else None,
)
async def test_seeded_output_does_not_depend_on_drafting_or_on_company(sampling, num_jobs, gammas):
    """Plain and alone is the reference; then each draft length, alone and all at once."""
    async with system(gamma=8) as served:
        prompts = [served.tokenizer.encode(text) for text in PROMPTS]
        jobs = [
            request(prompts[index % len(prompts)], 16, sampling=replace(sampling, seed=(sampling.seed + index) % 2**64))
            for index in range(num_jobs)
        ]
        expected = [await served.tokens(replace(job, max_draft_tokens=0)) for job in jobs]
        assert len({tuple(tokens) for tokens in expected}) > num_jobs // 2, "seeds matter"
        for number, gamma in enumerate(gammas):
            drafted = [replace(job, max_draft_tokens=gamma) for job in jobs]
            assert await served.tokens(drafted[number]) == expected[number]
            assert await asyncio.gather(*map(served.tokens, drafted)) == expected
        await served.check_nothing_is_held()


@pytest.mark.parametrize("policy", [pytest.param("adaptive", marks=pytest.mark.ci), "static_tree"])
@pytest.mark.parametrize("verification", [Verification.RECURSIVE_REJECTION, Verification.SEQUENTIAL_SELECTION])
async def test_trees_of_draws_are_greedy_like_the_rest_and_accept_guesses_when_they_sample(verification, policy):
    speculation = SpeculationConfig(max_draft_tokens=4, max_block_tokens=8, draft_timeout_s=30.0, guessers=("draft",))
    speculation = replace(speculation, policy=policy, verification=verification)
    async with system(speculation=speculation, is_patient=True) as served:
        prompt = served.tokenizer.encode(PROMPTS[0])
        greedy = request(prompt, 16, verification=verification)
        assert await served.tokens(greedy) == await served.tokens(replace(greedy, max_draft_tokens=0))
        stats = (await served.complete(replace(greedy, sampling=Sampling(temperature=1.0, seed=9))))[-1].stats
        assert policy == "adaptive" or stats.num_accepted_tokens > 0
        assert policy == "adaptive" or stats.num_drafted_tokens > 4 * stats.num_draft_rounds, "blocks are trees"
        await served.check_nothing_is_held()


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
async def test_rejection_and_block_are_greedy_like_the_rest_and_accept_guesses_when_they_sample(verification):
    async with system(is_patient=True) as served:
        prompt = served.tokenizer.encode(PROMPTS[0])
        greedy = request(prompt, 32, verification=verification)
        assert await served.tokens(greedy) == await served.tokens(replace(greedy, max_draft_tokens=0))
        chunks = await served.complete(replace(greedy, sampling=Sampling(temperature=1.0, seed=9)))
        assert chunks[-1].stats.num_accepted_tokens > 0
        await served.check_nothing_is_held()


async def test_a_resumed_stream_gives_the_tokens_that_the_first_would_have_given():
    async with system() as served:
        job = request(served.tokenizer.encode(PROMPTS[1]), 32, sampling=PENALISED)
        expected = await served.tokens(job)
        for num_received in (1, 13, 31):
            resumed = replace(job, resume_tokens=tuple(expected[:num_received]))
            assert await served.tokens(resumed) == expected[num_received:]


async def test_preemption_changes_no_token():
    """Room for two of five sequences: the others' KV is dropped and computed again, over and over.

    Drafting has no room for five either; nobody waits for it as long as other tests do.
    """
    async with system() as served:
        jobs = [
            request(served.tokenizer.encode(text), 24, sampling=replace(USUAL, seed=n))
            for n, text in enumerate(PROMPTS[:5])
        ]
        expected = await served.all_tokens(jobs)
    impatient = SpeculationConfig(policy="static", max_draft_tokens=4, draft_timeout_s=0.2)
    async with system(kv_cache_tokens=96, speculation=impatient) as served:
        assert await asyncio.gather(*map(served.tokens, jobs)) == expected
        stats = await served.leases.loops["target"].ask(lambda engine: engine.stats())
        assert stats.num_preemptions > 0
        await served.check_nothing_is_held()


async def test_chunks_of_prefill_change_no_token():
    async with system() as served:
        prompt = served.tokenizer.encode("\n".join(PROMPTS) * 3)
        expected = await served.tokens(request(prompt, 16))
    async with system(max_step_tokens=48, prefill_chunk_tokens=17) as served:
        companion = asyncio.ensure_future(served.tokens(request(prompt[:20], 40)))
        assert await served.tokens(request(prompt, 16)) == expected
        await companion
        await served.check_nothing_is_held()


async def test_reported_logprobs_are_those_of_the_raw_model():
    async with system() as served:
        prompt = served.tokenizer.encode(PROMPTS[0])
        chunks = await served.complete(request(prompt, 12, sampling=SHARP, num_logprobs=3))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        reported = [entry for chunk in chunks for entry in chunk.logprobs]
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(reported) == len(tokens) == 12
    for row, token, entry in zip(expected, tokens, reported, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == row.topk(3).indices.tolist()
