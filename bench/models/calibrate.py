"""Makes a draft whose step costs a given share of the target's step on this machine.

Knows the runtime and grown checkpoints; serves nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.models.grow import cached
from bench.models.sizes import Shape, read_shape
from core.config import Dtype, EngineConfig
from workers.model import loader
from workers.runtime import ModelRuntime
from workers.step import StepRows

CONTEXT_TOKENS = 128
NUM_STEPS = 30
MAX_LAYERS = 48


@dataclass(frozen=True, slots=True)
class Draft:
    """A grown draft, and the cost of its step relative to the target's."""

    model: Path
    shape: Shape
    cost_ratio: float


def draft_of_cost(source: Path, target: Path, cost_ratio: float, dtype: Dtype, directory: Path) -> Draft:
    """Grow `source` to about `cost_ratio`: at its own width or four times as wide, with as many layers as needed.

    No weight is rounded at these widths. The time of a step is linear in the number of layers, so measuring two depths
    gives the needed number. The target's step is deterministic and compiled, as the benchmarks serve it.
    """
    target_s = step_s(target, dtype, deterministic=True)

    def timed(shape: Shape) -> Draft:
        model = cached(source, shape, dtype, directory)
        return Draft(model, shape, step_s(model, dtype) / target_s)

    narrow = read_shape(source)
    wide = replace(
        narrow,
        hidden_size=4 * narrow.hidden_size,
        num_attention_heads=4 * narrow.num_attention_heads,
        num_key_value_heads=2 * narrow.num_key_value_heads,
        intermediate_size=4 * narrow.intermediate_size,
    )
    found = [timed(shape) for shape in (narrow, wide)]
    found += [timed(_deepened(shallow, timed, cost_ratio)) for shallow in found if shallow.cost_ratio < cost_ratio]
    return min(found, key=lambda draft: abs(draft.cost_ratio - cost_ratio))


def _deepened(shallow: Draft, timed: Callable[[Shape], Draft], cost_ratio: float) -> Shape:
    """`shallow` with the number of layers, at most MAX_LAYERS, that brings its cost ratio closest to `cost_ratio`."""
    num_layers = shallow.shape.num_hidden_layers
    deep = timed(replace(shallow.shape, num_hidden_layers=4 * num_layers))
    of_layer = max(deep.cost_ratio - shallow.cost_ratio, 1e-6) / (3 * num_layers)
    num_more = round((cost_ratio - shallow.cost_ratio) / of_layer)
    return replace(shallow.shape, num_hidden_layers=min(num_layers + num_more, MAX_LAYERS))


@torch.inference_mode()
def step_s(model: Path, dtype: Dtype, *, deterministic: bool = False) -> float:
    """Median seconds of a forward pass over one token after a short context, on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = EngineConfig(
            str(model), dtype=dtype, kv_cache_tokens=8 * CONTEXT_TOKENS, deterministic=deterministic, compile=True
        )
        runtime = ModelRuntime(loader.load(config, lambda _: None), config)
        runtime.warm_up()  # also chooses the tiles of deterministic steps
        kv = runtime.cache.new_sequence()
        runtime.forward([StepRows(kv, [0] * CONTEXT_TOKENS)])
        return statistics.median(_timed(runtime, StepRows(kv, [0])) for _ in range(NUM_STEPS))
    finally:
        torch.set_num_threads(num_threads)


def _timed(runtime: ModelRuntime, rows: StepRows) -> float:
    started_s = time.perf_counter()
    runtime.forward([rows])
    return time.perf_counter() - started_s
