"""Whether a kernel that reads KV by block tables can be used: checks its requirements, and compares its results.

Such kernels need a GPU, on which the tests of this project do not run. Therefore each start compares its results on all
kinds of rows with those of gathering, and gathers KV if they differ.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from core.errors import first_line
from core.speculation import ROOT
from workers.attention.paged import Kernel, paged_inputs
from workers.attention.seam import Attention
from workers.step import KVCache, LayerShape, SequenceKV, Span, Step, Tiling, plan_step

logger = logging.getLogger(__name__)

BLOCK_MULTIPLE = 256
"""FlashAttention-2 checks it: `Paged KV cache block size must be divisible by 256`."""
MAX_DIM = 256
CAPABILITY = (8, 0)
LARGEST_ERROR = 0.05
"""Largest allowed error of a row relative to its norm; rounding to bfloat16 gives about 0.01."""
HEADS_PER_KV_HEAD = 4
NUM_BLOCKS = 16


def find_kernel(cache: KVCache) -> Kernel | None:
    """The kernel for this KV; None where KV has to be gathered. On a GPU the log says why."""
    if cache.device.type != "cuda":
        return None
    reason = obstacle(cache, torch.cuda.get_device_capability(cache.device)) or difference(cache, Kernel())
    if reason is None:
        return Kernel()
    logger.warning("attention gathers KV, so that every step takes longer: %s", reason)
    return None


def obstacle(cache: KVCache, capability: tuple[int, int]) -> str | None:
    """Why torch's kernel cannot read this KV; None if it can."""
    if (dtype := cache.keys[0].dtype) != torch.bfloat16:
        return f"dtype is {dtype}, and the kernel takes bfloat16"
    if cache.block_tokens % BLOCK_MULTIPLE:
        return f"block_tokens is {cache.block_tokens}, and the kernel takes multiples of {BLOCK_MULTIPLE}"
    for shape in _shapes(cache):
        if shape.key_dim != shape.value_dim or shape.key_dim % 8 or shape.key_dim > MAX_DIM:
            return f"keys have {shape.key_dim} dimensions and values {shape.value_dim}, not both a multiple of 8 to 256"
    return None if capability >= CAPABILITY else f"compute capability is {capability}, the kernel needs {CAPABILITY}"


@torch.inference_mode()
def difference(cache: KVCache, kernel: Kernel) -> str | None:
    """How the kernel's results differ from those of gathering, on KV of these shapes; None if they do not."""
    for shape in _shapes(cache):
        try:
            errors = _errors(shape, cache, kernel)
        except RuntimeError as error:
            return first_line(error)
        if not float(errors.max()) <= LARGEST_ERROR:
            return f"the kernel is off by {float(errors.max()):.2g} of a row's norm"
    return None


def _shapes(cache: KVCache) -> set[LayerShape]:
    pairs = zip(cache.keys, cache.values, strict=True)
    return {LayerShape(keys.shape[1], keys.shape[2], values.shape[2]) for keys, values in pairs}


def _errors(shape: LayerShape, like: KVCache, kernel: Kernel) -> Tensor:
    """Relative errors of the rows of two steps: one of plain rows, and one of chunks, chains and trees.  # [rows]"""
    size = like.block_tokens
    cache = KVCache([shape], NUM_BLOCKS, size, like.keys[0].dtype, like.device)
    random = torch.Generator(like.device).manual_seed(0)
    for pool in (*cache.keys, *cache.values):
        pool[size:].normal_(generator=random)  # but for the blank block
    kvs = [_sequence(cache, num_tokens) for num_tokens in (size + size // 4, size // 2, 2 * size, 3)]
    plain = [Span(kv, row, 1) for row, kv in enumerate(kvs)]
    ragged = [
        Span(kvs[0], 0, 70),
        Span(kvs[1], 70, 1, (ROOT, 0, 1)),
        Span(kvs[2], 74, 2, (ROOT, ROOT, 0, 1, 1)),
        Span(kvs[3], 81, 0, (ROOT, ROOT, 1), num_cached_nodes=1),
    ]
    return torch.cat([_errors_of_step(shape, cache, spans, kernel, random) for spans in (plain, ragged)])


def _sequence(cache: KVCache, num_tokens: int) -> SequenceKV:
    kv = cache.new_sequence()
    cache.reserve(kv, num_tokens)
    cache.extend(kv, num_tokens)
    return kv


def _errors_of_step(
    shape: LayerShape, cache: KVCache, spans: list[Span], kernel: Kernel, random: torch.Generator
) -> Tensor:
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    num_rows = sum(span.num_rows for span in spans)
    like = cache.keys[0]
    query, key, value = (
        torch.randn(1, heads, num_rows, shape.key_dim, dtype=like.dtype, device=like.device, generator=random)
        for heads in (HEADS_PER_KV_HEAD * shape.num_kv_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    step = Step([0] * num_rows, [0] * num_rows, [], spans)
    *_, paged_plan = paged_inputs(step, cache, kernel, Tiling())
    plans = (plan_step(cache, spans, num_rows, Tiling()), paged_plan)
    attention = Attention(shape.key_dim**-0.5, None, None, None)
    want, got = (attention.run_layer(0, plan, query, key, value)[0].flatten(1).float() for plan in plans)
    error: Tensor = torch.linalg.vector_norm(got - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
    return error
