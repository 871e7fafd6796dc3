"""Ranks compile their layers as a single process does, with sums over ranks as operators in them.

Inductor compiles here for the CPU, on both ranks, and gloo makes the sums. No GPU has run it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from core.config import EngineConfig
from tests import checkpoints
from tests.workers.attention.kernels import PlainKernel
from tests.workers.parallel.ranks import Followers, followed
from tests.workers.runtime.backends.test_compiled_layers import OnAnyDevice
from tests.workers.runtime.backends.test_cuda_graph import again, recording
from tests.workers.runtime.test_runtime import assert_same, eager_logits, held, random_tree, tokens
from workers.model.shards import ModelShard, ModuleShard
from workers.parallel.group import Rank
from workers.products import fuse_projections, use_tiles
from workers.runtime import backends, runtime
from workers.runtime.backends.compiled_layers import OPTIONS
from workers.runtime.backends.eager import EagerBackend
from workers.runtime.backends.operators import operator_context
from workers.runtime.runtime import ModelRuntime
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough

SETTINGS: dict[str, Any] = {"compile": True, "max_step_tokens": 32, "kv_cache_tokens": 2048}
NUM_LAYERS = 6
NUM_STEPS = 5
"""Of `logits_of_steps`."""


@contextmanager
def compiled_layers() -> Iterator[None]:
    """In this process runtimes have compiled layers, recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", (recording(again), OnAnyDevice, EagerBackend))
        patch.setattr(runtime, "find_kernel", lambda _, **__: PlainKernel())
        yield


def compiles(config: EngineConfig, rank: Rank) -> str:
    with compiled_layers():
        return followed(config, rank)


def logits_of_steps(shared: ModelRuntime) -> tuple[Tensor, list[list[int]]]:
    """Logits of single rows of two sequences, of a tree and of a chain; and the text of each row."""
    rng = random.Random(3)
    a, b = tokens(rng, 7), tokens(rng, 12)
    kvs, tree = [held(shared, a), held(shared, b)], random_tree(rng, 1)
    steps = [[StepRows(kvs[0], [1]), StepRows(kvs[1], [2])], [StepRows(kvs[0], [3], tree)], [StepRows(kvs[1], [4, 5])]]
    texts = [[*a, 1], [*b, 2], [*a, 1, 3], [*a, 1, 3, *tree.tokens], [*b, 2, 4, 5]]
    return torch.cat([shared.forward(step) for step in steps]), texts


def begin(counters: Any = torch._dynamo.utils.counters) -> None:
    torch._dynamo.reset()
    counters.clear()


def num_graphs() -> int:
    """Number of graphs that this process has compiled since `begin`."""
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def graphs_of_one_process(path: Path) -> int:
    begin()
    with compiled_layers():
        alone = checkpoints.runtime(path, **SETTINGS)
    alone.warm_up(lambda _: None)
    logits_of_steps(alone)
    return num_graphs()


def count_sums(monkeypatch: pytest.MonkeyPatch, shared: ModelRuntime) -> Counter[str]:
    """Count the sums over ranks from now on."""
    shard, counts = shared.context.shard, Counter[str]()
    assert shard is not None
    own = type(shard.collectives).all_reduce

    def all_reduce(self: Any, rows: Tensor) -> Tensor:
        counts["sums"] += 1
        return own(self, rows)

    monkeypatch.setattr(type(shard.collectives), "all_reduce", all_reduce)
    return counts


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_ranks_compile_what_a_single_process_compiles(
    family: str, followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt_neox has biases, and two sums that do not depend on each other."""
    layers = {"num_hidden_layers": NUM_LAYERS}
    path, eager = checkpoints.write(family, tmp_path, **layers), checkpoints.build(family, **layers)
    alone = graphs_of_one_process(path)
    begin()
    with compiled_layers(), followers.runtime(path, compiles, **SETTINGS) as shared:
        shared.warm_up(lambda _: None)
        assert [type(each) for each in shared.backends._built][1:] == [OnAnyDevice]
        counts = count_sums(monkeypatch, shared)
        logits, texts = logits_of_steps(shared)
        assert_same(logits, torch.stack([eager_logits(eager, text)[-1] for text in texts]))
        assert shared.num_eager_steps == 0
    assert num_graphs() == alone > 0
    of_embedding = int(family == "llama")
    assert counts["sums"] == NUM_STEPS * (2 * NUM_LAYERS + of_embedding)


@dataclass
class TwoRanks:
    """Collectives of two ranks that have the same tensors; sums are new tensors, as those with an order are."""

    exchange: None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return 2 * tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor], dim=-1)


class Layer(nn.Module):
    """Its first product is gathered, its second one summed."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered, self.summed = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, rows: Tensor) -> Tensor:
        residual: Tensor = rows + self.summed(torch.relu(self.gathered(rows)))
        return residual


@torch.inference_mode()
def test_compiled_code_gathers_and_sums_as_the_layers_own_code() -> None:
    torch._dynamo.reset()
    layer, shard = Layer(), ModelShard(0, 2)
    shard._shards = {
        "gathered": ModuleShard(layer.gathered, "colwise_gather_output", slice(0, 4), 8, 4),
        "summed": ModuleShard(layer.summed, "rowwise", slice(0, 8), 16, 8),
    }
    shard.connect(TwoRanks())
    rows = torch.randn(3, 4)
    code = torch.compile(layer._call_impl, dynamic=True, fullgraph=True)
    with operator_context(None, (), shard):  # type: ignore[arg-type]  # nothing attends
        got = code(rows)
    torch.testing.assert_close(got, layer(rows))


class Residual(nn.Module):
    """As in a layer, something is computed before the product, and after the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.relu(rows + self.summed(torch.relu(rows)))


@torch.inference_mode()
def test_a_sum_costs_no_kernel_beside_it() -> None:
    layer, shard = Residual(), ModelShard(0, 2)
    shard._shards = {"summed": ModuleShard(layer.summed, "rowwise", slice(0, 8), 16, 8)}
    use_tiles(layer, is_tiled=False)
    found = []
    for num_ranks in (1, 2):
        if num_ranks > 1:
            shard.connect(TwoRanks())
        torch._dynamo.reset()
        code = torch.compile(layer._call_impl, dynamic=True, fullgraph=True, options=OPTIONS)
        with operator_context(None, (), shard):  # type: ignore[arg-type]  # nothing attends
            _, [text] = run_and_get_code(code, torch.randn(3, 8))
        calls = text[text.index("def call(") : text.index("return (")]
        found.append([calls.count(name) for name in ("cpp_fused_", "outrider.product.default(", "all_reduce.default(")])
    assert found == [[2, 1, 0], [2, 1, 1]]


def test_layers_with_collectives_of_their_own_are_not_fused() -> None:
    """What takes their place would not make them."""
    model = nn.Module()
    model.gate_proj, model.up_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    model.up_proj.register_forward_hook(lambda _, args, output: 2 * output)
    rows = torch.randn(3, 4)
    assert fuse_projections(model, lambda: (model.gate_proj(rows), model.up_proj(rows)), is_tiled=False) == 0
