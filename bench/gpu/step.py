"""Steps of a model with the shape of an 8B on a GPU, against the memory's roofline, by rows and context. Also in
deterministic mode.

Weights are random and created on the GPU: a step's time does not depend on them, and nothing has to be downloaded. The
runtime is that of the engines, warmed up the same way. Knows the runtime; must not know engines or text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.engine.devices import memory_loop, timed
from bench.results import Result, at_least, at_most, say
from core.config import EngineConfig
from core.records import Findings, ModelInfo
from core.speculation import TokenTree
from workers.attention import ATTENTION
from workers.model import LoadedModel, probe_layers
from workers.runtime import ModelRuntime
from workers.runtime.backends.cuda_graph import CudaGraphBackend
from workers.step import SequenceKV, StepRows

SHAPE_8B: Final = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
}
"""Llama 3.1 8B."""
SHAPE_1B: Final = SHAPE_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Llama 3.2 1B."""
CONTEXT: Final = 65_536
PREFILL: Final = 2_000
"""Number of tokens per step while a context is filled."""
MAX_ROWS: Final = 64
"""Rows of the largest CUDA graph. Recording as many graphs as a service does takes half a minute."""
STEPS: Final = 20
CASES: Final = ((1_000, 1, 1), (1_000, 1, 8), (1_000, 1, 32), (8_000, 1, 1), (8_000, 1, 8), (1_000, 32, 1))
"""(tokens of context, sequences, rows of each sequence)."""


def random_runtime(shape: dict[str, Any], **settings: Any) -> ModelRuntime:
    """A cold runtime on the GPU, with a Llama of this shape and random weights."""
    model_config = LlamaConfig(**shape, max_position_embeddings=CONTEXT, rope_theta=500_000.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(model_config, attn_implementation=ATTENTION).eval()
    finally:
        torch.set_default_dtype(before)
    info = ModelInfo(
        name="random weights",
        architecture=type(model).__name__,
        dtype="bfloat16",
        device="cuda",
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        vocab_size=model_config.vocab_size,
        max_context_tokens=CONTEXT,
        kv_cache_tokens=0,
        eos_token_ids=(),
        bos_token_id=None,
        layers=(),
    )
    config = EngineConfig(
        "random", dtype="bfloat16", device="cuda", block_tokens=64, max_step_tokens=MAX_ROWS, compile=True, **settings
    )
    return ModelRuntime(LoadedModel(model, info, probe_layers(model, model_config)), config)


def step_results() -> list[Result]:
    """Times of steps as CUDA graphs, relative to the roofline, to a plain step, and to steps without CUDA graphs."""
    device = torch.device("cuda")
    memory = memory_loop(device)
    runtime = random_runtime(SHAPE_8B, kv_cache_tokens=300_000)
    _build(runtime)
    byte_s = statistics.median(memory() for _ in range(3))
    times = {case: _step_s(runtime, device, *case) for case in CASES}
    plain = times[CASES[0]]
    results = [
        at_most(1.25, _over_roofline(runtime, byte_s, case, times[case])) for case in CASES if case[1:] == (1, 1)
    ]
    results.append(at_most(1.1, _ratio("verifying 8 rows: time over 1", times[CASES[1]], plain)))
    results.append(_ratio("verifying 32 rows: time over 1", times[CASES[2]], plain))
    results.append(
        at_most(1.1, _ratio("verifying 8 rows at 8,000 tokens: time over 1", times[CASES[4]], times[CASES[3]]))
    )
    results.append(_ratio("32 streams: time of a step over that of one", times[CASES[5]], plain))
    results.append(at_most(12.0, _kernels_of_a_layer(runtime)))
    built = runtime.backends._built
    runtime.backends._built = [each for each in built if not isinstance(each, CudaGraphBackend)]
    results.append(
        _ratio("compiled steps that are not recorded: time over recorded", _step_s(runtime, device, *CASES[0]), plain)
    )
    runtime.backends._built = []
    results.append(_ratio("the model's own code: time over recorded", _step_s(runtime, device, *CASES[0]), plain))
    runtime.backends._built = built
    return results


def deterministic_results() -> list[Result]:
    """Whether a row's bits are independent of the batch, and the cost of that."""
    device = torch.device("cuda")
    plain, exact = (random_runtime(SHAPE_1B, kv_cache_tokens=40_000, deterministic=each) for each in (False, True))
    _build(plain)
    findings = _build(exact)
    is_met = Result("deterministic: a row's bits are its own", float(findings.tile_rows is not None), "yes")
    results = [at_least(1.0, is_met)]
    for case in ((100, 1, 1), (8_000, 1, 1)):
        name = f"deterministic: time of a step at {case[0]:,} tokens over that of others, 1B"
        results.append(_ratio(name, _step_s(exact, device, *case), _step_s(plain, device, *case)))
    return results


def _build(runtime: ModelRuntime) -> Findings:
    """Warm up, and build what an engine builds while it is idle."""
    findings = runtime.warm_up(say)
    while runtime.build_more(is_idle=True):
        pass
    return findings


def _step_s(runtime: ModelRuntime, device: torch.device, context: int, num_sequences: int, num_rows: int) -> float:
    """Median seconds of a step with `num_rows` rows of each sequence."""
    kvs = [runtime.cache.new_sequence() for _ in range(num_sequences)]
    for kv in kvs:
        for first in range(0, context, PREFILL):
            runtime.forward([StepRows(kv, [3] * min(PREFILL, context - first))])
    step = _step(runtime, kvs, num_rows)
    step()
    found = statistics.median(timed(device, step) for _ in range(STEPS))
    for kv in kvs:
        runtime.cache.free(kv)
    return found


def _step(runtime: ModelRuntime, kvs: Sequence[SequenceKV], num_rows: int) -> Callable[[], None]:
    def step() -> None:
        runtime.forward([StepRows(kv, [1], TokenTree.chain([2] * (num_rows - 1))) for kv in kvs])
        for kv in kvs:
            runtime.cache.truncate(kv, kv.num_tokens - num_rows)

    return step


def _over_roofline(runtime: ModelRuntime, byte_s: float, case: tuple[int, int, int], step_s: float) -> Result:
    """Time of a step over the time to read all weights except the embedding, and the KV, from memory."""
    embedding = runtime.context.model.get_input_embeddings().weight
    num_weights = runtime.info.num_parameters - embedding.numel()
    of_token = sum(pool[0].nbytes for pool in (*runtime.cache.keys, *runtime.cache.values))
    roofline_s = byte_s * (num_weights * embedding.itemsize + case[0] * of_token)
    settings = {"step, ms": round(1e3 * step_s, 3), "roofline, ms": round(1e3 * roofline_s, 3)}
    settings["GB/s"] = round(1e-9 / byte_s, 1)
    name = f"a step of 8B at {case[0]:,} tokens: time over the memory's roofline"
    return Result(name, round(step_s / roofline_s, 3), "x", settings=settings)


def _ratio(name: str, time_s: float, other_s: float) -> Result:
    settings = {"ms": round(1e3 * time_s, 3), "other, ms": round(1e3 * other_s, 3)}
    return Result(name, round(time_s / other_s, 3), "x", settings=settings)


def _kernels_of_a_layer(runtime: ModelRuntime) -> Result:
    """Number of kernels of a step per layer, rounded down, counted by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    kv = runtime.cache.new_sequence()
    step = _step(runtime, [kv], 1)
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    runtime.cache.free(kv)
    num_kernels = sum(event.count for event in found.key_averages())
    num_layers = len(runtime.cache.keys)
    settings = {"kernels of a step": num_kernels, "layers": num_layers}
    return Result("kernels of a layer", num_kernels // num_layers, "kernels", settings=settings)


def with_card(results: Sequence[Result], card: str) -> list[Result]:
    """Add the name of the GPU to the results' settings."""
    return [replace(result, settings={**result.settings, "card": card}) for result in results]
