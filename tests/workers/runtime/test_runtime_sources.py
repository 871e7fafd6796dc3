"""Encoder-decoders in the runtime: greedy decoding by verification equals transformers' `generate`, token by token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from core.speculation.token_tree import TokenTree
from tests import checkpoints
from tests.workers.runtime.test_runtime_families import accepted_path, guesses
from workers.runtime.runtime import ModelRuntime
from workers.step.kv_cache import SequenceKV
from workers.step.rows import StepRows

NUM_TOKENS = 48
START = 0
FAMILIES = [*checkpoints.ENCODER_DECODERS]


def a_source(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, checkpoints.VOCAB_SIZE - 1) for _ in range(num_tokens)]


def noisy(logits: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Logits [R, V], with noise that depends on the number of tokens before each: random models repeat themselves."""
    noise = [torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(length)) for length in lengths]
    return logits / logits.std(dim=1, keepdim=True) + torch.stack(noise)


@torch.inference_mode()
def generated(family: str, source: list[int]) -> list[int]:
    model = checkpoints.build(family)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([source])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        logits_processor=[_add_noise],
    )
    assert output[0, 0] == START
    return output[0, 1:].tolist()  # type: ignore[no-any-return]  # transformers is untyped


def _add_noise(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    in_vocabulary = noisy(logits[:, : checkpoints.VOCAB_SIZE], [input_ids.shape[1]])
    padding = torch.full((1, logits.shape[1] - checkpoints.VOCAB_SIZE), -torch.inf)
    return torch.cat([in_vocabulary, padding], dim=1)


def opened(runtime: ModelRuntime, source: list[int]) -> SequenceKV:
    kv = runtime.cache.new_sequence()
    kv.num_source = len(source)
    return kv


def verified_round(
    runtime: ModelRuntime, sequences: list[tuple[SequenceKV, list[int], list[int], TokenTree]]
) -> list[list[int]]:
    """Like in test_runtime_families, for several sequences in a step: KV, source, pending tokens and guesses."""
    logits = runtime.forward([StepRows(kv, pending, tree, source=source) for kv, source, pending, tree in sequences])
    emitted, first = [], 0
    for kv, _, _, tree in sequences:
        length = kv.num_tokens - len(tree) - kv.num_source
        lengths = [length + depth for depth in (0, *tree.depths)]
        choices = noisy(logits[first : first + 1 + len(tree)], lengths).argmax(dim=-1).tolist()
        first += 1 + len(tree)
        path = accepted_path(tree, choices)
        runtime.cache.compact(kv, kv.num_tokens - len(tree), path)
        emitted.append([*(tree.tokens[node] for node in path), choices[1 + path[-1] if path else 0]])
    return emitted


@pytest.mark.parametrize("deterministic", [False, True], ids=["as it comes", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_verified_guesses_decode_what_generate_decodes(family: str, deterministic: bool, tmp_path: Path) -> None:
    """Three sources of different lengths in one batch, one of which ends with a block."""
    rng = random.Random(family)
    sources = [a_source(seed, size) for seed, size in enumerate((37, 5, 64))]
    wants = [generated(family, source) for source in sources]
    runtime = checkpoints.runtime(checkpoints.write(family, tmp_path), deterministic=deterministic)
    kvs = [opened(runtime, source) for source in sources]
    got: list[list[int]] = [[] for _ in sources]
    num_rounds = 0
    while any(len(each) < NUM_TOKENS for each in got):
        rows = [
            (kv, source, each[-1:] or [*source, START], guesses(rng, want[len(each) :]))
            for kv, source, each, want in zip(kvs, sources, got, wants, strict=True)
        ]
        for each, new in zip(got, verified_round(runtime, rows), strict=True):
            each += new
        num_rounds += 1
    assert [each[:NUM_TOKENS] for each in got] == wants
    assert num_rounds < NUM_TOKENS, "some guesses were right, so there were fewer rounds than tokens"
    assert all(len(set(want)) > 8 for want in wants), "a model that repeats itself would prove little"
    assert len({tuple(want) for want in wants}) == len(wants), "the source decides"
