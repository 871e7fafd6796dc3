"""A published EAGLE head computes what its algorithm in plain torch does: over chains, trees, chunks and gaps."""

from __future__ import annotations

import pytest
import torch

from core.config import EngineConfig
from core.records import Features
from core.speculation import ROOT, TokenTree
from tests import checkpoints, eagle
from workers.runtime import load_head_runtime
from workers.step import StepRows

TOKENS = [5, 17, 99, 4, 200, 31, 8, 77, 123]
TREE = TokenTree((7, 9, 7, 30, 2), (ROOT, ROOT, 0, 0, 1))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama")


@pytest.fixture(scope="module")
def states():
    random = torch.Generator().manual_seed(3)
    return torch.randn(len(TOKENS) - 1, 3 * eagle.HIDDEN, generator=random).bfloat16()


def features(states, first=0, end=None):
    rows = states[first:end].contiguous()
    return Features(first, rows.shape[1], rows.view(torch.int16).numpy().tobytes())


def runtime_of(target, head):
    return load_head_runtime(EngineConfig(str(target), head=head, block_tokens=4, kv_cache_tokens=256), lambda _: None)


def reference_of(model, tensors, **changes):
    embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    return eagle.Reference({**eagle.CONFIG, **changes}, tensors, embedding, model.lm_head.weight.detach())


def assert_same(logits, expected):
    assert torch.equal(logits.isinf(), expected.isinf()), "tokens outside of its vocabulary have no chance"
    torch.testing.assert_close(logits, expected, atol=5e-5, rtol=5e-5)


def grown(reference, seen, position):
    """Rows of TREE below the row of the last token."""
    rows, above = [], []
    for token, parent in zip(TREE.tokens, TREE.parents, strict=True):
        before = seen if parent == ROOT else [*above[parent], rows[parent]]
        depth = len(before) - len(seen) + 1
        rows.append(reference.row(token, reference.own_feature(before[-1]), position + depth, before))
        above.append(before)
    return rows


def check_parity(target, model, states, head, tensors, **changes):
    runtime, reference = runtime_of(target, head), reference_of(model, tensors, **changes)
    seen = reference.commit(TOKENS, states.float())
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, TOKENS[:3], wants_logits=False, features=features(states))])
    (logits,) = runtime.forward([StepRows(kv, TOKENS[3:], features=features(states))])
    assert_same(logits, reference.logits(seen[-1]))
    rows = grown(reference, seen, len(TOKENS) - 2)
    first = runtime.forward([StepRows(kv, [], TREE.prefix(2), 0)])
    second = runtime.forward([StepRows(kv, [], TREE, 2)])
    expected = torch.stack([reference.logits(row) for row in rows])
    assert_same(torch.cat([first, second]), expected)


VARIANTS = {
    "authors": {},
    "speculators": {"norm_before_residual": True},
    "eagle3.1": {"norm_output": True},
    "two layers, wide heads": {"num_hidden_layers": 2, "head_dim": 16},
    "own rope": {"rope_theta": 500.0},
    "whole vocabulary": {"draft_vocab_size": eagle.VOCAB},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_chain_and_tree(target, model, states, tmp_path, changes):
    head, tensors = eagle.head_at(tmp_path / "head", **changes)
    check_parity(target, model, states, head, tensors, **changes)


def norms(random, size):
    return 1 + 0.2 * torch.randn(size, generator=random)


def test_optional_tensors(target, model, states, tmp_path):
    """Norms of EAGLE-3.1, of gpt-oss's heads and of queries and keys; biases; an embedding of its own."""
    random = torch.Generator().manual_seed(5)
    tensors = eagle.tensors_of(eagle.CONFIG)
    attention = "midlayer.self_attn"
    tensors |= {f"fc_norm.{index}.weight": norms(random, eagle.HIDDEN) for index in range(3)}
    tensors |= {"input_norm.weight": norms(random, 3 * eagle.HIDDEN)}
    tensors |= {f"{attention}.{name}_norm.weight": norms(random, 8) for name in "qk"}
    tensors |= {
        f"{attention}.{name}_proj.bias": norms(random, size) for name, size in {"q": 32, "k": 16, "v": 16}.items()
    }
    head = eagle.write(tmp_path / "head", eagle.CONFIG, tensors)
    check_parity(target, model, states, head, tensors)


@pytest.mark.parametrize("borrowed", eagle.OWN)
def test_what_it_lacks_is_the_targets(target, model, states, tmp_path, borrowed):
    tensors = eagle.tensors_of(eagle.CONFIG)
    del tensors[borrowed]
    check_parity(target, model, states, eagle.write(tmp_path / "head", eagle.CONFIG, tensors), tensors)


def test_in_a_batch_each_row_is_its_own_sequences(target, model, states, tmp_path):
    """Committed rows of one sequence beside guesses of another."""
    head, tensors = eagle.head_at(tmp_path / "head")
    runtime, reference, other = runtime_of(target, head), reference_of(model, tensors), reference_of(model, tensors)
    seen, expected = reference.commit(TOKENS, states.float()), other.commit(TOKENS[:5], states.float())
    kv, second = runtime.cache.new_sequence(), runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, TOKENS, features=features(states))])
    rows = grown(reference, seen, len(TOKENS) - 2)
    begun = StepRows(second, TOKENS[:5], features=features(states, 0, 4))
    logits = runtime.forward([StepRows(kv, [], TREE.prefix(2)), begun])
    assert_same(logits[:2], torch.stack([reference.logits(row) for row in rows[:2]]))
    assert_same(logits[2], other.logits(expected[-1]))


@pytest.mark.parametrize("held", [0, 3])
def test_it_attends_only_to_rows_whose_features_it_has(target, model, states, tmp_path, held):
    """A message without the features of a prefix, on a new engine or after some tokens: the same as without the
    prefix, at the text's own positions."""
    head, tensors = eagle.head_at(tmp_path / "head")
    runtime, reference = runtime_of(target, head), reference_of(model, tensors)
    kv, known = runtime.cache.new_sequence(), features(states, 5)
    if held:
        runtime.forward([StepRows(kv, TOKENS[:held], features=features(states, 0, held - 1))])
    runtime.forward([StepRows(kv, TOKENS[held:6], wants_logits=False, features=known)])
    (logits,) = runtime.forward([StepRows(kv, TOKENS[6:], features=known)])
    seen = reference.commit(TOKENS, states.float(), first=6)
    assert_same(logits, reference.logits(seen[-1]))
    rows = grown(reference, seen, len(TOKENS) - 2)
    guessed = runtime.forward([StepRows(kv, [], TREE.prefix(2))])
    assert_same(guessed, torch.stack([reference.logits(row) for row in rows[:2]]))
    runtime.cache.truncate(kv, 2)  # the text goes back to before the gap: nothing of the old rows is seen
    runtime.forward([StepRows(kv, TOKENS[2:], features=features(states, 1))])
    again = reference_of(model, tensors)
    seen = again.commit(TOKENS, states.float(), first=2)
    assert_same(runtime.forward([StepRows(kv, [], TREE.prefix(1))])[0], again.logits(grown(again, seen, 7)[0]))
