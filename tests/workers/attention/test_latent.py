"""Latents instead of keys and values: the same logits and tokens, in a fraction of the memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import checkpoints
from tests.workers.parallel.test_parallel import all_kinds_of_steps, write
from tests.workers.runtime.test_runtime import assert_same, eager_logits, tokens
from tests.workers.runtime.test_runtime_families import guesses, verified_round
from workers.attention import ATTENTION, keep_latents
from workers.attention.latent import is_latent
from workers.model import loader, probe_layers
from workers.runtime.runtime import ModelRuntime
from workers.step.kv_cache import LayerShape
from workers.step.rows import StepRows

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
SIZES = {name: value for name, value in checkpoints.EXPERTS["deepseek_v2"].items() if "lora" in name or "head" in name}
PUBLISHED = {
    "deepseek_v3": (128, {"num_attention_heads": 128, "num_key_value_heads": 128}),
    "glm4_moe_lite": (20, {"num_attention_heads": 20, "num_key_value_heads": 20}),
}
"""Heads of DeepSeek V3 and of GLM-4.7-Flash; all other sizes are defaults of the configurations."""


def sizes(family: str) -> dict[str, Any]:
    return SIZES if family == "minicpm3" else {}


def rough(family: str, path: Path, **overrides: Any) -> tuple[Path, Any]:
    """A checkpoint whose norms are not all ones, and the model as transformers computes it."""
    write(family, path, **sizes(family) | overrides)
    return path, AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize("family", LATENT)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Logits of chunks, of a tree, and after its compaction and a roll-back."""
    path, eager = rough(family, tmp_path)
    runtime, rng = checkpoints.runtime(path, block_tokens=4), random.Random(family)
    assert all(shape == LayerShape(1, 16 + 8, 16, values_in_keys=True) for shape in runtime.cache.shapes)
    text, kv = tokens(rng, 40), runtime.cache.new_sequence()
    for first, end in ((0, 17), (17, 18), (18, 40)):
        got = runtime.forward([StepRows(kv, text[first:end])])
        assert_same(got[-1], eager_logits(eager, text[:end])[-1])
    want = [text[-1]]
    for _ in range(24):
        want.append(int(eager_logits(eager, [*text, *want[1:]])[-1].argmax()))
    runtime.cache.truncate(kv, 39)
    decoded = verified_round(runtime, kv, want[:1], guesses(rng, want[1:]))
    while len(decoded) < 20:
        decoded += verified_round(runtime, kv, decoded[-1:], guesses(rng, want[1 + len(decoded) :]))
    assert decoded[:20] == want[1:21]


@pytest.mark.parametrize("family", LATENT)
def test_all_kinds_of_steps_are_those_of_expanded_keys(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = rough(family, tmp_path)
    latent = checkpoints.runtime(path)
    monkeypatch.setattr(loader, "keep_latents", lambda _: None)
    expanded = checkpoints.runtime(path)
    assert not expanded.cache.shapes[0].values_in_keys
    for got, want in zip(all_kinds_of_steps(latent), all_kinds_of_steps(expanded), strict=True):
        assert_same(got, want)


def test_in_bfloat16_rounding_is_that_of_expanded_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32, neither is off by more than the other, give or take a half."""
    path, _ = rough("minicpm3", tmp_path, hidden_size=128, num_hidden_layers=4)
    exact, latent = checkpoints.runtime(path), checkpoints.runtime(path, dtype="bfloat16")
    monkeypatch.setattr(loader, "keep_latents", lambda _: None)
    expanded = checkpoints.runtime(path, dtype="bfloat16")
    errors = [error_of(runtime, exact) for runtime in (latent, expanded)]
    assert errors[0] < 1.5 * errors[1]
    assert errors[0] < 0.05


def error_of(runtime: ModelRuntime, exact: ModelRuntime) -> float:
    """The mean error of the logits over their mean."""
    got, want = (torch.cat([*map(torch.flatten, all_kinds_of_steps(each))]) for each in (runtime, exact))
    return float((got - want).abs().mean() / want.abs().mean())


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_token_takes_a_latent_and_a_rotary_part(family: str) -> None:
    num_heads, heads = PUBLISHED[family]
    config = AutoConfig.for_model(family, num_hidden_layers=1, vocab_size=64, first_k_dense_replace=1, **heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    [before] = probe_layers(model, config)
    keep_latents(model)
    [after] = probe_layers(model, config)
    of_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    assert before.num_stored == num_heads * of_head
    assert after.num_stored == 512 + 64


def test_where_latents_are_larger_keys_stay_expanded(tmp_path: Path) -> None:
    path, eager = rough("minicpm3", tmp_path, kv_lora_rank=256)
    runtime = checkpoints.runtime(path)
    assert not runtime.cache.shapes[0].values_in_keys
    text = tokens(random.Random(1), 20)
    assert_same(runtime.forward([StepRows(runtime.cache.new_sequence(), text)])[-1], eager_logits(eager, text)[-1])


def test_latents_of_code_that_is_not_known_are_expanded_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints.build("deepseek_v3")
    attention = type(model.model.layers[0].self_attn)
    known = attention.expand_kv
    monkeypatch.setattr(attention, "expand_kv", lambda self, latent, rotary: known(self, latent.relu(), rotary))
    monkeypatch.setattr("workers.attention.latent.DeepseekV3Attention", type("Known", (), {"expand_kv": known}))
    keep_latents(model)
    assert not any(map(is_latent, model.modules()))
