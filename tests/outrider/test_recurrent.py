"""Pairs with recurrent layers: drafting changes no token, with such a target, such a draft, or both."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from tests import checkpoints
from tests.reference import generate

pytestmark = pytest.mark.thorough

NUM_TOKENS = 24
STATIC = {
    "speculation.max_draft_tokens": 4,
    "speculation.draft_timeout_s": 30.0,
    "speculation.breaker_rounds": 1000,
    "limits.max_sessions": 6,
    "target.engine.kv_cache_tokens": 8192,
}
"""The adaptive policy would rest on a busy machine, and late drafts would be left: nothing would be drafted."""


def write(family, path, seed=0):
    return checkpoints.write(family, path, seed, vocab_size=checkpoints.VOCAB_SIZE)


def write_alike(family, path):
    """A draft that often agrees with the family's target: its weights with noise."""
    file = write(family, path) / "model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(5)
    noisy = {
        name: weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1
        else weight
        for name, weight in weights.items()
    }
    save_file(noisy, file, {"format": "pt"})
    return path


PAIRS = [
    ("qwen3_next", "qwen3_next"),
    ("qwen3_next", "llama"),
    ("llama", "qwen3_5_text"),
    ("lfm2", "lfm2"),
    ("bamba", "bamba"),
]


@pytest.mark.parametrize(
    ("target", "draft", "policy"),
    [
        pytest.param(*pair, policy, marks=() if (number + index) % 2 else pytest.mark.slow)
        for number, pair in enumerate(PAIRS)
        for index, policy in enumerate(("static", "static_tree"))
    ],
)
def test_drafting_changes_no_token(tmp_path, target, draft, policy):
    rng = random.Random(target + draft)
    prompts = [[rng.randrange(checkpoints.EOS) for _ in range(length)] for length in (1, 20, 90, 1, 20, 90, 20, 20)]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9 * (n % 2), seed=n, ignore_eos=True) for n in range(8)
    ]
    path = write_alike(draft, tmp_path / "draft") if draft == target else write(draft, tmp_path / "draft", seed=2)
    settings = {**STATIC, "speculation.policy": policy}
    whole = write(target, tmp_path / "target")
    with LLM(whole, draft=path, settings=settings, progress=False) as llm:
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, [replace(each, max_draft_tokens=0) for each in params])
        alone = llm.generate(prompts[1], replace(params[1], max_draft_tokens=0))
    assert [output.token_ids for output in plain[:4:2]] == [
        tuple(generate(whole, prompt, NUM_TOKENS)) for prompt in prompts[:4:2]
    ]
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert alone[0].token_ids == plain[1].token_ids
    stats = [output.outputs[0].stats for output in drafted]
    assert sum(each.num_drafted_tokens for each in stats) > 0
    if draft == target:  # a stranger's guesses are right by luck alone
        assert sum(each.num_accepted_tokens for each in stats) > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["llama", "qwen3_next"])
def test_of_two_hundred_streams_none_is_unlike_plain_decoding(tmp_path, draft, caplog):
    """Greedy and seeded, twelve at once, and no message of the draft out of order."""
    rng = random.Random(draft)
    prompts = [[rng.randrange(checkpoints.EOS) for _ in range(rng.choice([1, 20, 90]))] for _ in range(200)]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9 * (n % 2), seed=n, ignore_eos=True) for n in range(200)
    ]
    path = write(draft, tmp_path / "draft", seed=2) if draft == "llama" else write_alike(draft, tmp_path / "draft")
    settings = {**STATIC, "speculation.policy": "static_tree", "limits.max_sessions": 12}
    with LLM(write("qwen3_next", tmp_path / "target"), draft=path, settings=settings, progress=False) as llm:
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, [replace(each, max_draft_tokens=0) for each in params])
    num_unlike = sum(one.token_ids != other.token_ids for one, other in zip(drafted, plain, strict=True))
    assert num_unlike == 0
    assert "corrupt" not in caplog.text
