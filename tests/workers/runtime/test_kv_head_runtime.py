"""A published EAGLE head computes what its algorithm in plain torch does: over chains, trees, chunks and gaps."""

from __future__ import annotations

import logging

import pytest
import torch

from core.config import EngineConfig
from core.records import Features
from core.speculation import ROOT, TokenTree
from tests import checkpoints, eagle
from workers.runtime import load_head_runtime
from workers.runtime.heads.native_head import NativeHead
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


def runtime_of(target, head, **settings):
    """A runtime of native code."""
    config = EngineConfig(str(target), head=head, block_tokens=4, kv_cache_tokens=256, **settings)
    runtime, told = load_head_runtime(config, lambda _: None), []
    runtime.warm_up(told.append)
    assert told == [f"a step of the head is a program, run by {config.num_threads} threads"]
    return runtime


def reference_of(model, tensors, **changes):
    embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    return eagle.Reference({**eagle.CONFIG, **changes}, tensors, embedding, model.lm_head.weight.detach())


def assert_same(logits, expected):
    assert torch.equal(logits.isinf(), expected.isinf()), "tokens outside of its vocabulary have no chance"
    scale = float(expected[expected.isfinite()].abs().max())  # heads without a final norm have large logits
    torch.testing.assert_close(logits, expected, atol=max(5e-5, 5e-6 * scale), rtol=5e-5)


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
    check_runtime(target, states, head, reference_of(model, tensors, **changes))


def check_runtime(target, states, head, reference):
    runtime = runtime_of(target, head)
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


FIRST_VARIANTS = {
    "authors": ((), {}),
    "the target's embedding, no bias": (("embed_tokens.weight", "fc.bias"), {}),
    "two layers, wide heads, own rope": ((), {"num_hidden_layers": 2, "head_dim": 16, "rope_theta": 500.0}),
}


@pytest.mark.parametrize(("absent", "changes"), FIRST_VARIANTS.values(), ids=FIRST_VARIANTS)
def test_eagle_1_and_2(target, model, states, tmp_path, absent, changes):
    config = {**eagle.FIRST_CONFIG, **changes}
    tensors = {name: tensor for name, tensor in eagle.first_tensors_of(config).items() if name not in absent}
    head = eagle.write(tmp_path / "head", config, tensors, "pytorch_model.bin")
    embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    reference = eagle.FirstReference(config, tensors, embedding, model.lm_head.weight.detach())
    check_runtime(target, states[:, : eagle.HIDDEN], head, reference)


def test_biases_of_eagle_1(target, model, states, tmp_path):
    """Heads of Qwen2 have some."""
    tensors = eagle.first_tensors_of(eagle.FIRST_CONFIG)
    for name, size in {"q": 32, "k": 16, "v": 16}.items():
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.linspace(-1, 1, size)
    head = eagle.write(tmp_path / "head", eagle.FIRST_CONFIG, tensors)
    reference = eagle.FirstReference(
        eagle.FIRST_CONFIG, tensors, tensors["embed_tokens.weight"], model.lm_head.weight.detach()
    )
    check_runtime(target, states[:, : eagle.HIDDEN], head, reference)


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 2, "norm_before_residual": True}])
def test_p_eagle(target, model, states, tmp_path, changes):
    """A node's logits are those of the mask row of its depth, whatever is guessed above it."""
    changes = {"mask_token_id": 299, **changes}
    config = {**eagle.CONFIG, **changes}
    random = torch.Generator().manual_seed(6)
    tensors = eagle.tensors_of(config) | {"mask_hidden": torch.randn(1, 3 * eagle.HIDDEN, generator=random)}
    tensors |= {f"fc_norm.{index}.weight": norms(random, eagle.HIDDEN) for index in range(3)}
    runtime = runtime_of(target, eagle.write(tmp_path / "head", config, tensors))
    reference = reference_of(model, tensors, **changes)
    seen = reference.commit(TOKENS, states.float())
    kv = runtime.cache.new_sequence()
    (logits,) = runtime.forward([StepRows(kv, TOKENS, features=features(states))])
    assert_same(logits, reference.logits(seen[-1]))
    by_depth = reference.masked(2, seen, len(TOKENS) - 1)
    first = runtime.forward([StepRows(kv, [], TREE.prefix(2), 0)])
    second = runtime.forward([StepRows(kv, [], TREE, 2)])
    assert_same(torch.cat([first, second]), torch.stack([by_depth[depth - 1] for depth in TREE.depths]))


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


def steps_of(runtime, states):
    """Rows of tokens and of guesses, one after another and then together."""
    alone, kv = runtime.cache.new_sequence(), runtime.cache.new_sequence()
    rows = []
    for end in range(2, len(TOKENS) + 1):
        last = features(states, 0, end - 1)
        rows.append(runtime.forward([StepRows(alone, TOKENS[alone.num_tokens : end], features=last)]))
    rows += [runtime.forward([StepRows(alone, [], TREE.prefix(end), end - 1)]) for end in range(1, len(TREE) + 1)]
    runtime.forward([StepRows(kv, TOKENS[:-2], wants_logits=False, features=features(states))])
    together = [runtime.forward([StepRows(kv, TOKENS[-2:], features=features(states))])]
    together += [runtime.forward([StepRows(kv, [], TREE.prefix(2))]), runtime.forward([StepRows(kv, [], TREE, 2)])]
    return torch.cat(rows), torch.cat(together)


def test_bits_of_a_row_depend_on_nothing_beside_it(target, states, tmp_path):
    head, _ = eagle.head_at(tmp_path / "head")
    by_one, by_three = (runtime_of(target, head, dtype="bfloat16", num_threads=num_threads) for num_threads in (1, 3))
    rows, together = steps_of(by_one, states)
    assert torch.equal(rows[-len(together) :], together)
    for got, want in zip(steps_of(by_three, states), (rows, together), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fault", ["refused", "broken", "wrong"])
def test_without_native_code_it_runs_its_own(target, model, states, tmp_path, monkeypatch, caplog, fault):
    """And says so in a line: where nothing can be recorded, where a program fails, and where it gives other logits."""
    if fault == "refused":
        monkeypatch.setattr("workers.runtime.program.recorder.record", lambda *_: 1 / 0)
    elif fault == "broken":
        monkeypatch.setattr(NativeHead, "run", lambda *_: 1 / 0)
    else:
        run = NativeHead.run
        monkeypatch.setattr(NativeHead, "run", lambda *args: tuple(1 + part for part in run(*args)))
    head, tensors = eagle.head_at(tmp_path / "head")
    told = []
    with caplog.at_level(logging.INFO):
        runtime = load_head_runtime(EngineConfig(str(target), head=head, block_tokens=4, kv_cache_tokens=256), str)
        runtime.warm_up(told.append)
    assert not told
    assert caplog.text.count("is run by its own code: ") == 1
    reference = reference_of(model, tensors)
    seen = reference.commit(TOKENS, states.float())
    (logits,) = runtime.forward([StepRows(runtime.cache.new_sequence(), TOKENS, features=features(states))])
    assert_same(logits, reference.logits(seen[-1]))
