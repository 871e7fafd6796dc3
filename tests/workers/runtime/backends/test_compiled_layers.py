"""Compiled layers compute what the model's own code does, for every kind of step, by one compilation for all layers.

Inductor compiles here for the CPU; it plans what is joined into one kernel in the same way for a GPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from tests import checkpoints
from tests.workers.attention.kernels import PlainKernel
from tests.workers.runtime.backends.test_cuda_graph import again, recording
from tests.workers.runtime.test_runtime import assert_same, eager_logits, in_all_ways, tokens
from workers.model.loader import load
from workers.runtime import backends
from workers.runtime.backends.compiled_layers import CompiledLayersBackend
from workers.runtime.backends.eager import EagerBackend
from workers.runtime.runtime import ModelRuntime
from workers.step import StepRows

pytestmark = pytest.mark.thorough


NUM_LAYERS = 6
FAMILIES = (
    "gemma2",
    pytest.param("gpt2", marks=pytest.mark.ci),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2")),
)
"""gemma2 has two kinds of layers, gpt2 biases and other names."""
MOST_GRAPHS = 8
"""One row and any number of rows, of each of two kinds of layers and of the last norm, and two to spare; layers that
did not share their code would take 12."""


class OnAnyDevice(CompiledLayersBackend):
    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return config.compile


def runtime_of(path: Path, *kinds: Any, **settings: Any) -> ModelRuntime:
    config = EngineConfig(**{"model": str(path), "kv_cache_tokens": 2048, "compile": True} | settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", (*kinds, OnAnyDevice, EagerBackend))
        runtime = ModelRuntime(load(config, lambda _: None), config, kernel=PlainKernel())
    runtime.warm_up(lambda _: None)
    return runtime


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_batches_of_all_sizes_agree(family: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": NUM_LAYERS}
    runtime, eager = runtime_of(checkpoints.write(family, tmp_path, **layers)), checkpoints.build(family, **layers)
    assert [type(backend) for backend in runtime.backends._built] == [OnAnyDevice]
    rng = random.Random(5)
    seqs, nexts = [tokens(rng, rng.randint(1, 40)) for _ in range(4)], [tokens(rng, 6) for _ in range(4)]
    want = torch.stack([eager_logits(eager, [*ids, *some])[-6:] for ids, some in zip(seqs, nexts, strict=True)])
    for got in in_all_ways(runtime, seqs, nexts):
        assert_same(got, want)
    assert runtime.num_eager_steps == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= MOST_GRAPHS


def test_graphs_record_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(checkpoints.write("llama", tmp_path), recording(again), max_step_tokens=8)
    graphs, layers = runtime.backends._built
    assert graphs.below is layers
    calls: list[int] = []
    own = OnAnyDevice.logits

    def counted(self: Any, *inputs: Any) -> Any:
        calls.append(len(inputs[0]))
        return own(self, *inputs)

    monkeypatch.setattr(OnAnyDevice, "logits", counted)
    runtime.forward([StepRows(runtime.cache.new_sequence(), [1, 2, 3])])
    assert calls == [4]
