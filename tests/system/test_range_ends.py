"""At both ends of every range tokens are those of transformers, drafted or not; without a law there is an error."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from local import DEMO, request, system
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core import noise
from core.errors import UnsoundScores
from core.noise import Purpose
from core.ranges import ranges_of
from core.records import BIAS, Sampling
from tests.checkpoints import write

PROMPT = "def parse_args(self, args):\n    "
NUM_TOKENS = 8
SUBNORMAL = 5e-324
SAMPLING = ranges_of(Sampling)
ALMOST_ONE = math.nextafter(1.0, 0.0)
WARM = Sampling(temperature=1.0, seed=5)


def ends(name):
    allowed = SAMPLING[name]
    return [replace(WARM, **{name: end}) for end in (allowed.low, allowed.high)]


def penalties(name):
    """At both ends of the temperature's range, too, where a penalty weighs most and least; and greedily."""
    return [
        replace(sampling, temperature=temperature)
        for sampling in ends(name)
        for temperature in (0.0, SAMPLING["temperature"].low, 1.0, SAMPLING["temperature"].high)
    ]


def biased(*biases, **fields):
    """With biases of four tokens."""
    return replace(WARM, logit_bias=tuple(zip((40, 41, 42, 43), biases, strict=False)), **fields)


AT_THE_ENDS = [
    *ends("temperature"),
    replace(WARM, temperature=-0.0),
    *ends("top_k"),
    *[replace(WARM, top_p=top_p) for top_p in (SUBNORMAL, 1e-38, ALMOST_ONE, 1.0)],
    *[replace(WARM, min_p=min_p) for min_p in (0.0, SUBNORMAL, 1e-38, ALMOST_ONE, 1.0)],
    *penalties("repetition_penalty"),
    *penalties("presence_penalty"),
    *penalties("frequency_penalty"),
    replace(WARM, presence_penalty=SUBNORMAL, frequency_penalty=-SUBNORMAL),
    *[biased(end, temperature=t) for end in (BIAS.low, BIAS.high) for t in (0.0, 0.001, 1.0, 100.0)],
    biased(SUBNORMAL, -SUBNORMAL),
    *[replace(sampling, temperature=t) for sampling in ends("seed") for t in (1.0, 100.0)],
    replace(WARM, seed=SAMPLING["seed"].high, temperature=100.0, top_p=SUBNORMAL, min_p=1.0, repetition_penalty=10.0),
    replace(WARM, temperature=0.001, repetition_penalty=0.1, presence_penalty=-2.0, frequency_penalty=-2.0),
    *[replace(WARM, temperature=t, allowed_token_ids=tuple(range(40, 400))) for t in (0.0, 1.0)],
    *[
        replace(WARM, temperature=t, allowed_token_ids=(40, 41, 42, 43), bad_words=((40, 40), (41,), (42, 40, 42)))
        for t in (0.0, 1.0, 100.0)
    ],
]
"""The ends of each range, and of some at once. Parameters that end the output are tested below."""


class CountPenalties:
    """Presence and frequency penalties, which transformers lacks: over the output, by OpenAI's formula."""

    def __init__(self, sampling, prompt_len):
        self._sampling, self._prompt_len = sampling, prompt_len

    def __call__(self, ids, scores):
        counts = torch.bincount(ids[0, self._prompt_len :], minlength=scores.shape[1])
        sampling = self._sampling
        return scores - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty


class OutputsBadWords:
    """Bad words of the output alone, as in vLLM; transformers also looks into the prompt."""

    def __init__(self, sampling, prompt_len):
        self._process = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words])
        self._prompt_len = prompt_len

    def __call__(self, ids, scores):
        return self._process(ids[:, self._prompt_len :], scores)


def processors(sampling, prompt_len):
    """transformers' processors for these parameters, in the order in which its `generate` applies them."""
    found = LogitsProcessorList()
    if sampling.allowed_token_ids:
        found.append(PrefixConstrainedLogitsProcessor(lambda *_: list(sampling.allowed_token_ids), 1))
    if sampling.bad_words:
        found.append(OutputsBadWords(sampling, prompt_len))
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    found.append(CountPenalties(sampling, prompt_len))
    if sampling.min_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(prompt_len, sampling.min_tokens, list(sampling.suppressed_ids)))
    if sampling.is_greedy:
        return found
    found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    found.append(TopPLogitsWarper(sampling.top_p))
    found.append(MinPLogitsWarper(sampling.min_p))
    return found


def draw(law, sampling, position):
    if sampling.is_greedy:
        return int(law.argmax())
    gumbel = noise.gumbel(sampling.seed, position, 0, Purpose.SHARED, len(law))
    return int((law.log_softmax(0).numpy().astype(np.float32) + gumbel).argmax())


@torch.inference_mode()
def generate(model, prompt, sampling, num_tokens, end=None):
    """The tokens by transformers' model and processors, these in float64, and the noise that belongs to the seed."""
    ids, process, cache, fresh = list(prompt), processors(sampling, len(prompt)), DynamicCache(), list(prompt)
    while len(ids) < len(prompt) + num_tokens and ids[-1] != end:
        logits = model(torch.tensor([fresh]), past_key_values=cache).logits[:, -1].double()
        fresh = [draw(process(torch.tensor([ids]), logits)[0], sampling, len(ids))]
        ids += fresh
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()


@pytest.mark.parametrize("num_tokens", [6, pytest.param(16, marks=pytest.mark.ci)])
async def test_at_the_ends_of_ranges_tokens_are_those_of_transformers_with_and_without_drafting(model, num_tokens):
    async with system() as served:
        prompt = served.tokenizer.encode(PROMPT)
        jobs = [request(prompt, num_tokens, sampling=sampling) for sampling in AT_THE_ENDS]
        plain = await asyncio.gather(*(served.tokens(replace(job, max_draft_tokens=0)) for job in jobs))
        for sampling, tokens in zip(AT_THE_ENDS, plain, strict=True):
            assert tokens == generate(model, prompt, sampling, num_tokens), sampling
        assert await asyncio.gather(*map(served.tokens, jobs)) == plain
        await served.check_nothing_is_held()


async def test_however_likely_the_end_is_it_comes_when_it_may_and_not_before(model):
    async with system() as served:
        prompt = served.tokenizer.encode(PROMPT)
        (end,) = served.leases.engines["target"].info.eos_token_ids
        samplings = [
            Sampling(temperature, min_tokens=min_tokens, suppressed_ids=(end,), logit_bias=((end, 100.0),))
            for temperature, min_tokens in product([0.0, 1.0, 100.0], [0, 1, NUM_TOKENS - 1, NUM_TOKENS])
        ]
        jobs = [request(prompt, NUM_TOKENS, sampling=sampling, ignore_eos=False) for sampling in samplings]
        expected = [generate(model, prompt, sampling, NUM_TOKENS, end) for sampling in samplings]
        assert await served.all_tokens(replace(job, max_draft_tokens=0) for job in jobs) == expected
        assert await served.all_tokens(jobs) == expected
        for sampling, tokens in zip(samplings, expected, strict=True):
            assert end not in tokens[: sampling.min_tokens]
            assert sampling.temperature == 100 or len(tokens) == min(sampling.min_tokens + 1, NUM_TOKENS)


def poisoned(path, token):
    """A model that gives NaN wherever it has read `token`."""
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = math.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


POISON = 250
MAX_TRIES = 50
"""On a busy machine eight tokens may be generated before the draft's first answer is there."""
NEIGHBOURS = [[5, 17, 99, 4], [31, 200, 8], [7] * 9]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)])
async def test_where_the_target_gives_nan_that_stream_fails_and_its_neighbours_get_their_tokens(tmp_path, sampling):
    target, draft = write("llama", tmp_path / "target", seed=1), write("llama", tmp_path / "draft", seed=1)
    jobs = [request(prompt, NUM_TOKENS, sampling=sampling) for prompt in NEIGHBOURS]
    async with system(target, draft) as served:
        expected = [await served.tokens(job) for job in jobs]
    async with system(poisoned(target, POISON), draft) as served:
        bad = request([3, POISON, 5], NUM_TOKENS, sampling=sampling)
        *tokens, error = await asyncio.gather(*map(served.tokens, [*jobs, bad]), return_exceptions=True)
        assert tokens == expected
        assert isinstance(error, UnsoundScores)
        await served.check_nothing_is_held()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)])
async def test_where_the_draft_gives_nan_the_tokens_are_the_targets_own(tmp_path, sampling):
    target, draft = write("llama", tmp_path / "target", seed=1), write("llama", tmp_path / "draft", seed=1)
    async with system(target, poisoned(draft, POISON)) as served:
        job = request([3, POISON, 5], NUM_TOKENS, sampling=sampling, policy="static", pipelining=False)
        expected = await served.tokens(replace(job, max_draft_tokens=0))
        for _ in range(MAX_TRIES):
            chunks = await served.complete(job)
            assert [token for chunk in chunks for token in chunk.token_ids] == expected
            stats = chunks[-1].stats
            if stats.num_draft_failures:
                break
        assert stats.num_draft_failures > 0
        assert stats.num_accepted_tokens == stats.num_drafted_tokens - stats.num_lookup_tokens == 0
        await served.check_nothing_is_held()
