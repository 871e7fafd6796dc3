"""Greedy decoding by verification of guesses equals transformers' own `generate`, token by token, in every family."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from core.speculation.token_tree import ROOT, TokenTree
from tests import checkpoints
from workers.runtime.runtime import ModelRuntime
from workers.step.kv_cache import SequenceKV
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough

NUM_TOKENS = 40
PROMPT_TOKENS = 40
"""Longer than the sliding windows of checkpoints.FAMILIES."""


def guesses(rng: random.Random, truth: list[int]) -> TokenTree:
    """A random tree with a path of 0 to 4 right guesses in it, and wrong ones beside it."""
    tokens: list[int] = []
    parents: list[int] = []
    last = ROOT
    for right in truth[: rng.randint(0, 4)]:
        tokens += [rng.randrange(checkpoints.VOCAB_SIZE), right]
        parents += [last, last]
        last = len(tokens) - 1
    for _ in range(rng.randint(0, 3)):
        parents.append(rng.randint(ROOT, len(tokens) - 1))
        tokens.append(rng.randrange(checkpoints.VOCAB_SIZE))
    return TokenTree(tuple(tokens), tuple(parents))


def accepted_path(tree: TokenTree, choices: list[int]) -> list[int]:
    """The nodes that equal the target's own choice, root downwards; `choices[0]` is the root's."""
    path: list[int] = []
    node: int | None = tree.child(ROOT, choices[0])
    while node is not None:
        path.append(node)
        node = tree.child(node, choices[1 + node])
    return path


def verified_round(runtime: ModelRuntime, kv: SequenceKV, pending: list[int], tree: TokenTree) -> list[int]:
    """The tokens that one round of verification emits; the KV holds all of them but the last."""
    half = len(tree) // 2  # the other half is a step of its own, below nodes whose KV is there
    logits = runtime.forward([StepRows(kv, pending, tree.prefix(half))])
    if half < len(tree):
        logits = torch.cat([logits, runtime.forward([StepRows(kv, [], tree, half)])])
    choices = logits.argmax(dim=-1).tolist()
    path = accepted_path(tree, choices)
    runtime.cache.compact(kv, kv.num_tokens - len(tree), path)
    return [*(tree.tokens[node] for node in path), choices[1 + path[-1] if path else 0]]


@torch.inference_mode()
def generated(family: str, prompt: list[int]) -> list[int]:
    model = checkpoints.build(family)
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = list(range(checkpoints.VOCAB_SIZE, model.config.vocab_size))  # padding
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]  # transformers is untyped


EVERY = (*checkpoints.FAMILIES, *checkpoints.RECURRENT)
DETERMINISTIC = {*checkpoints.FAMILIES, "qwen3_5_text", "bamba", "lfm2", "mamba"}
"""One family with recurrent layers of each kind; the others are slow."""


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [pytest.param(family, False, id=f"{family}-as it comes") for family in EVERY]
    + [
        pytest.param(
            family, True, id=f"{family}-deterministic", marks=() if family in DETERMINISTIC else pytest.mark.slow
        )
        for family in EVERY
    ],
)
def test_verified_guesses_decode_what_generate_decodes(family: str, deterministic: bool, tmp_path: Path) -> None:
    """In deterministic steps all weights are packed, those of such small models, too."""
    rng = random.Random(family)
    prompt = [rng.randrange(checkpoints.VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
    want = generated(family, prompt)
    runtime = checkpoints.runtime(checkpoints.write(family, tmp_path), deterministic=deterministic)
    kv = runtime.cache.new_sequence()
    got, num_rounds = verified_round(runtime, kv, prompt, guesses(rng, want)), 1
    while len(got) < NUM_TOKENS:
        got += verified_round(runtime, kv, got[-1:], guesses(rng, want[len(got) :]))
        num_rounds += 1
        assert kv.num_tokens == PROMPT_TOKENS + len(got) - 1
    assert got[:NUM_TOKENS] == want
    assert num_rounds < NUM_TOKENS, "some guesses were right, so there were fewer rounds than tokens"
    assert len(set(want)) > 8, "a model that repeats itself would prove little"


@pytest.mark.parametrize("family", EVERY)
def test_the_models_of_these_tests_look_at_their_context(family: str) -> None:
    """Else the comparison above would pass without attention."""
    model = checkpoints.build(family)
    ids = torch.randint(checkpoints.VOCAB_SIZE, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, -10] = (changed[0, -10] + 1) % checkpoints.VOCAB_SIZE
    with torch.inference_mode():
        moved = (model(ids).logits[0, -1] - model(changed).logits[0, -1]).abs().max()
    assert moved > 0.01
