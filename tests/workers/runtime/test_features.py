"""Features are the hidden states that transformers computes, for each wanted row, on every backend."""

from __future__ import annotations

import random

import pytest
import torch

from core.errors import ConfigError
from core.speculation.token_tree import TokenTree
from tests import checkpoints
from tests.workers.attention.kernels import PlainKernel
from tests.workers.runtime.backends.test_compiled_layers import OnAnyDevice
from tests.workers.runtime.backends.test_cuda_graph import again, recording
from workers.runtime import backends
from workers.runtime.backend_stack import ALLOWED_ERROR
from workers.runtime.backends import CompiledBackend, EagerBackend, PackedBackend, ProgramBackend, TracedBackend
from workers.runtime.runtime import ModelRuntime
from workers.runtime.self_test import largest_error
from workers.step.rows import StepRows

LAYERS = (-1, 1, 0)


def hidden_states(family, ids, **sizes):
    """Hidden states of transformers' model, in the order of LAYERS.  # [tokens, layers * hidden]"""
    with torch.inference_mode():
        states = checkpoints.build(family, **sizes)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], dim=-1)


def check(runtime: ModelRuntime, family: str, **sizes: int) -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(256) for _ in range(21)]
    expected = hidden_states(family, tokens, **sizes)
    kv, other = runtime.cache.new_sequence(), runtime.cache.new_sequence()
    runtime.scores([StepRows(kv, tokens[:9], wants_logits=False)])
    scores = runtime.scores([StepRows(other, tokens[:5]), StepRows(kv, tokens[9:14], TokenTree.chain(tokens[14:]))])
    assert scores.logits.shape == (9, runtime.info.vocab_size)
    assert scores.features is not None
    torch.testing.assert_close(scores.features, torch.cat([expected[4:5], expected[13:]]), atol=2e-4, rtol=2e-4)
    scores = runtime.scores([StepRows(other, tokens[5:6])])
    torch.testing.assert_close(scores.features, expected[5:6], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", [*checkpoints.FAMILIES, "opt"])
def test_of_every_family(tmp_path, family):
    check(checkpoints.runtime(checkpoints.write(family, tmp_path), feature_layers=LAYERS), family)


@pytest.mark.parametrize("family", [family for family in checkpoints.FAMILIES if family != "gpt2"])
def test_a_program_returns_them(tmp_path, family):
    runtime = checkpoints.runtime(checkpoints.write(family, tmp_path), feature_layers=LAYERS)
    runtime.warm_up()
    check(runtime, family)
    assert runtime.backends.names[0] == ProgramBackend.__name__
    assert runtime.backends.num_base_steps == 0


def test_of_a_program_in_bfloat16(tmp_path):
    """Their bits depend on nothing beside the row, and they change no logits."""
    settings = {"dtype": "bfloat16", "deterministic": True}
    path = checkpoints.write("llama", tmp_path)
    tapped, plain = checkpoints.runtime(path, **settings, feature_layers=LAYERS), checkpoints.runtime(path, **settings)
    tapped.warm_up()
    plain.warm_up()
    tokens = random.Random(3).choices(range(256), k=40)
    whole = tapped.scores([StepRows(tapped.cache.new_sequence(), tokens, wants_all=True)])
    kv, other = tapped.cache.new_sequence(), tapped.cache.new_sequence()
    beside = [[StepRows(kv, [token]), StepRows(other, [token, token])] for token in tokens]
    alone = torch.cat([tapped.scores(batch).features[:1] for batch in beside])
    assert torch.equal(alone, whole.features)
    assert torch.equal(plain.forward([StepRows(plain.cache.new_sequence(), tokens, wants_all=True)]), whole.logits)
    assert largest_error(whole.features, hidden_states("llama", tokens)) < ALLOWED_ERROR[torch.bfloat16]


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param((TracedBackend, PackedBackend), id="traced"),
        pytest.param((CompiledBackend, PackedBackend), id="compiled", marks=pytest.mark.ci),
    ],
)
@pytest.mark.thorough
def test_on_a_cpu(tmp_path, monkeypatch, kinds):
    monkeypatch.setattr(backends, "BACKENDS", kinds)
    settings = {"compile": kinds[0] is CompiledBackend, "compile_cache": str(tmp_path / "compiled")}
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path / "m"), feature_layers=LAYERS, **settings)
    runtime.warm_up()
    assert len(runtime.backends._built) == 1
    check(runtime, "llama")


@pytest.mark.thorough
def test_recorded_and_compiled_for_a_gpu(tmp_path, monkeypatch):
    from core.config import EngineConfig
    from workers.model.loader import load

    monkeypatch.setattr(backends, "BACKENDS", (recording(again), OnAnyDevice, EagerBackend))
    path = checkpoints.write("llama", tmp_path)
    config = EngineConfig(str(path), kv_cache_tokens=4096, compile=True, feature_layers=LAYERS)
    runtime = ModelRuntime(load(config, lambda _: None), config, kernel=PlainKernel())
    runtime.warm_up()
    assert len(runtime.backends._built) == 2
    check(runtime, "llama")


def test_without_layers_there_are_none(tmp_path):
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path))
    assert runtime.scores([StepRows(runtime.cache.new_sequence(), [1, 2])]).features is None


def test_a_layer_that_the_model_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"feature_layers: 3 is not in \[-1, 2\]"):
        checkpoints.runtime(checkpoints.write("llama", tmp_path), feature_layers=(3,))
