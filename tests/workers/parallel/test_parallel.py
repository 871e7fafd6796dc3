"""Two ranks and three compute what one does, in every family, after whatever was rolled back or moved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.speculation.token_tree import TokenTree
from tests import checkpoints
from tests.quantized import quantize
from tests.workers.parallel.ranks import Followers
from tests.workers.runtime.test_runtime import assert_same, held, random_tree, tokens
from tests.workers.runtime.test_runtime_families import accepted_path, guesses, verified_round
from workers.runtime.runtime import ModelRuntime
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough

NUM_TOKENS = 24
SHAPES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, one head of keys": ("llama", {"num_key_value_heads": 1}),
    "llama, odd vocabulary": ("llama", {"vocab_size": 303}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"num_key_value_heads": 1}),
    "phi3, joined again": ("phi3", {"seed": 2}),
    "gpt_neox": ("gpt_neox", {}),
}
THREE = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48, "intermediate_size": 66}


@pytest.fixture(scope="module")
def two_followers() -> Iterator[Followers]:
    with Followers(2) as followers:
        yield followers


def all_kinds_of_steps(runtime: ModelRuntime) -> list[torch.Tensor]:
    """Logits of chunks, chains, trees and batches, after compactions, roll-backs and reuse of blocks."""
    rng = random.Random(5)
    a, b, gone = held(runtime, tokens(rng, 37)), held(runtime, tokens(rng, 5)), held(runtime, tokens(rng, 80))
    logits = [runtime.forward([StepRows(a, tokens(rng, 3)), StepRows(b, tokens(rng, 30))])]
    runtime.cache.free(gone)
    tree = random_tree(rng, 12)
    logits.append(runtime.forward([StepRows(a, tokens(rng, 1), tree), StepRows(b, tokens(rng, 1))]))
    deepest = max(range(12), key=lambda node: tree.depths[node])
    path = [node for node in range(12) if node == deepest or node in ancestors(tree, deepest)]
    assert path != list(range(len(path))), "KV has to move for it"
    runtime.cache.compact(a, a.num_tokens - 12, path)
    logits.append(runtime.forward([StepRows(a, tokens(rng, 2), TokenTree.chain(tokens(rng, 4)))]))
    runtime.cache.truncate(a, 20)
    c = runtime.cache.new_sequence()  # in blocks that others had
    logits.append(runtime.forward([StepRows(c, tokens(rng, 60)), StepRows(a, tokens(rng, 2))]))
    d, e = runtime.cache.new_sequence(), runtime.cache.new_sequence()  # a command of two broadcasts
    logits.append(runtime.forward([StepRows(d, tokens(rng, 300)), StepRows(e, tokens(rng, 320))]))
    for kv in (a, b, c, d, e):
        runtime.cache.free(kv)
    return logits


def ancestors(tree: TokenTree, node: int) -> set[int]:
    above = set()
    while (node := tree.parents[node]) >= 0:
        above.add(node)
    return above


def write(family: str, path: Path, **overrides: Any) -> Path:
    """A checkpoint whose norms and biases are none that leave everything as it is, as those of new models are."""
    checkpoints.write(family, path, **overrides)
    tensors = load_file(path / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    rough = {name: t + 0.2 * torch.randn(t.shape, generator=noise) * (t.ndim == 1) for name, t in tensors.items()}
    save_file(rough, path / "model.safetensors", metadata={"format": "pt"})
    return path


def decoded(runtime: ModelRuntime, prompt: list[int], truth: list[int]) -> list[int]:
    """Greedy tokens, by verification of random guesses around `truth`."""
    rng, kv = random.Random(9), runtime.cache.new_sequence()
    got = verified_round(runtime, kv, prompt, guesses(rng, truth))
    while len(got) < NUM_TOKENS:
        got += verified_round(runtime, kv, got[-1:], guesses(rng, truth[len(got) :]))
    runtime.cache.free(kv)
    return got[:NUM_TOKENS]


def assert_equal_to_one_rank(followers: Followers, path: Path, **settings: Any) -> None:
    alone = checkpoints.runtime(path)
    prompt = tokens(random.Random(1), 40)
    want = decoded(alone, prompt, [])
    assert len(set(want)) > 4, "a model that repeats itself would prove little"
    with followers.runtime(path, **settings) as shared:
        for got, single in zip(all_kinds_of_steps(shared), all_kinds_of_steps(alone), strict=True):
            assert_same(got, single)
        assert decoded(shared, prompt, want) == want
        assert shared.info == alone.info
        shared.cache.check_integrity()


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_compute_what_one_does(followers: Followers, shape: str, tmp_path: Path) -> None:
    family, overrides = SHAPES[shape]
    assert_equal_to_one_rank(followers, write(family, tmp_path, **overrides))


def test_three_ranks_share_one_head_of_keys_and_a_vocabulary_that_does_not_divide(
    two_followers: Followers, tmp_path: Path
) -> None:
    assert_equal_to_one_rank(two_followers, write("qwen3", tmp_path, **THREE))


def test_of_four_ranks_two_share_each_head_of_keys(tmp_path: Path) -> None:
    with Followers(3) as three_followers:
        assert_equal_to_one_rank(three_followers, write("qwen2", tmp_path))


def test_ranks_return_the_features_that_one_does(followers: Followers, tmp_path: Path) -> None:
    path, layers = checkpoints.write("llama", tmp_path), (-1, 1)
    alone = checkpoints.runtime(path, feature_layers=layers)
    with followers.runtime(path, feature_layers=layers) as shared:
        got, want = (
            each.scores([StepRows(each.cache.new_sequence(), [1, 2, 3], TokenTree.chain([4, 5]))])
            for each in (shared, alone)
        )
    assert got.features is not None
    assert want.features is not None
    assert_same(got.features, want.features)


@pytest.mark.parametrize("kind", ["DeepSeek", "FP8 rows", "W8A8", "W4A16 zero points", "GPTQ", "AWQ", "NVFP4"])
def test_two_ranks_share_quantized_weights(followers: Followers, kind: str, tmp_path: Path) -> None:
    scaled, _ = quantize(kind, write("llama", tmp_path / "original"), tmp_path)
    assert_equal_to_one_rank(followers, scaled)


def test_half_the_weights_and_the_kv_are_on_each_rank(followers: Followers, tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path)
    alone = checkpoints.runtime(path)
    with followers.runtime(path) as shared:
        assert shared.cache.keys[0].shape[1] * 2 == alone.cache.keys[0].shape[1]
        norms = sum(value.numel() for name, value in alone.context.model.named_parameters() if "norm" in name)
        whole, half = (
            sum(value.numel() for value in runtime.context.model.parameters()) - norms for runtime in (alone, shared)
        )
        assert half - 32 == whole / 2, "and the row of zeros that the embedding has for others' tokens"


def test_an_output_layer_that_is_tied_shares_the_memory_of_its_embedding(
    followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where native code has not packed it."""
    monkeypatch.setattr("workers.runtime.program.recorder.record", lambda *_: 1 / 0)
    with followers.runtime(checkpoints.write("llama", tmp_path, tie_word_embeddings=True)) as shared:
        model = shared.context.model
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_comparison_would_see_kv_that_was_not_moved(
    followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower is not told of the compaction: the very check of the tests above goes wrong."""
    path = checkpoints.write("llama", tmp_path)
    want = all_kinds_of_steps(checkpoints.runtime(path))
    with followers.runtime(path) as shared:
        move = type(shared.cache).__base__.move
        monkeypatch.setattr(type(shared.cache), "move", move)
        got = all_kinds_of_steps(shared)
    assert_same(got[1], want[1])
    with pytest.raises(AssertionError):
        assert_same(got[2], want[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_row_has_the_same_bits_alone_and_in_company(
    followers: Followers, dtype: str, tmp_path: Path
) -> None:
    path = checkpoints.write("llama", tmp_path)
    settings = {"deterministic": True, "dtype": dtype}
    with followers.runtime(path, **settings) as shared:
        assert_company_changes_no_bits(shared)


def test_three_deterministic_ranks_add_up_in_order(two_followers: Followers, tmp_path: Path) -> None:
    """The collective's own sums would not: where an element lies decides in which order its summands are added."""
    path = checkpoints.write("llama", tmp_path, **THREE)
    with two_followers.runtime(path, deterministic=True) as shared:
        assert_company_changes_no_bits(shared)


def assert_company_changes_no_bits(runtime: ModelRuntime) -> None:
    rng = random.Random(3)
    prompt, last = tokens(rng, 30), tokens(rng, 2)
    rows = []
    for num_others in (0, 1, 5, 12):
        kv = held(runtime, prompt)
        others = [StepRows(runtime.cache.new_sequence(), tokens(rng, 9)) for _ in range(num_others)]
        rows.append(runtime.forward([*others, StepRows(kv, last)])[-1])
        for item in (*(other.kv for other in others), kv):
            runtime.cache.free(item)
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_accepted_paths_of_the_tests_are_found() -> None:
    assert accepted_path(TokenTree((1, 2, 3), (-1, 0, 1)), [1, 2, 9, 9]) == [0, 1]
