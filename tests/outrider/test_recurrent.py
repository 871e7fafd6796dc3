"""Pairs with recurrent layers: drafting changes no token, with such a target, such a draft, or both."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from tests import checkpoints

pytestmark = pytest.mark.thorough

NUM_TOKENS = 24
STATIC = {"speculation.max_draft_tokens": 4, "speculation.draft_timeout_s": 30.0, "limits.max_sessions": 6}
"""The adaptive policy would rest on a busy machine, and nothing would be drafted."""


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


def generated(family, prompt):
    model = checkpoints.build(family, vocab_size=checkpoints.VOCAB_SIZE)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
    return tuple(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("policy", ["static", "static_tree"])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("qwen3_next", "qwen3_next"),
        ("qwen3_next", "llama"),
        ("llama", "qwen3_5_text"),
        ("lfm2", "lfm2"),
        ("bamba", "bamba"),
    ],
)
def test_drafting_changes_no_token(tmp_path, target, draft, policy):
    rng = random.Random(target + draft)
    prompts = [[rng.randrange(checkpoints.EOS) for _ in range(rng.choice([1, 20, 90]))] for _ in range(10)]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9 * (n % 2), seed=n, ignore_eos=True) for n in range(10)
    ]
    path = write_alike(draft, tmp_path / "draft") if draft == target else write(draft, tmp_path / "draft", seed=2)
    settings = {**STATIC, "speculation.policy": policy, "target.engine.kv_cache_tokens": 4096}
    with LLM(write(target, tmp_path / "target"), draft=path, settings=settings, progress=False) as llm:
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, max_draft_tokens=0)
        sampled = [
            llm.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.9, seed=n, ignore_eos=True, max_draft_tokens=0)[0]
            for n, prompt in enumerate(prompts)
            if n % 2
        ]
    assert [output.token_ids for output in plain[:4]] == [generated(target, prompt) for prompt in prompts[:4]]
    assert [output.token_ids for output in drafted[::2]] == [output.token_ids for output in plain[::2]]
    assert [output.token_ids for output in drafted[1::2]] == [output.token_ids for output in sampled]
    stats = [output.outputs[0].stats for output in drafted]
    assert sum(each.num_drafted_tokens for each in stats) > 0  # six sessions may lack states to draft with
    if draft == target:  # a stranger's guesses are right by luck alone
        assert sum(each.num_accepted_tokens for each in stats) > 20
