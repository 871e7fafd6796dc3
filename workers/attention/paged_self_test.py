"""Decides whether the paged kernel can be used: checks its requirements, and compares its results.

The kernel needs a GPU, on which the tests of this project do not run. Each start therefore compares its results on all
kinds of rows with those of gathering, and gathers KV if they differ.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from core.errors import first_line
from core.speculation import ROOT, TokenTree
from workers.attention.paged import Kernel, paged_inputs
from workers.attention.seam import Attention
from workers.step import KVCache, LayerShape, SequenceKV, Step, StepRows, Tiling, flatten, plan_step
from workers.step.kv_dtype import FP8, as_bits, as_stored

logger = logging.getLogger(__name__)

MAX_KERNEL_ERROR = 0.05
"""Largest allowed error of a row relative to its norm; rounding to bfloat16 gives about 0.01."""
HEADS_PER_KV_HEAD = 4
WINDOW, SOFTCAP = 7, 1.0
"""Window, shorter than the sequences, and softcap, below usual scores, of a second kind of layer. It also has sinks."""
NUM_BLOCKS, NUM_TOKENS = 16, 96
"""The test's sequences need at most this number of blocks, plus the blocks for this number of tokens."""


def find_kernel(cache: KVCache, *, is_deterministic: bool = False) -> Kernel | None:
    """Return the kernel for this KV; None if KV has to be gathered. On a GPU the log says why."""
    if cache.device.type != "cuda":
        return None
    try:
        from workers.attention.triton_attention import TritonKernel  # Triton comes with torch for CUDA
    except ImportError as error:
        reason: str | None = f"{first_line(error)}; pip install triton"
    else:
        kernel = TritonKernel(is_deterministic=is_deterministic)
        reason = difference(cache, kernel)
        if reason is None:
            return kernel
    logger.warning("attention gathers KV, so that every step takes longer: %s", reason)
    return None


@torch.inference_mode()
def difference(cache: KVCache, kernel: Kernel) -> str | None:
    """Why the kernel cannot be used: it fails, or differs from gathered attention on KV of the cache's shapes. None if
    it agrees."""
    try:
        error = find_difference(cache, kernel)
    except Exception as problem:  # noqa: BLE001  Triton, the driver and the C compiler raise errors of their own
        return f"{type(problem).__name__}: {first_line(problem)}"
    return None if error <= MAX_KERNEL_ERROR else f"the kernel is off by {error:.2g} of a row's norm"


@torch.inference_mode()
def find_difference(cache: KVCache, kernel: Kernel) -> float:
    """The largest error of a row relative to its norm, on KV of these shapes; NaN if there is any.

    A window, a softcap and sinks are tried together, because each kind of layer is a kernel that has to be compiled.
    """
    errors = [_errors(shape, cache, kernel) for shape in set(cache.shapes) - {LayerShape()}]
    return float(torch.cat(errors).max()) if errors else 0.0


def _errors(shape: LayerShape, like: KVCache, kernel: Kernel) -> Tensor:
    """Relative errors of the rows of plain steps and of chunks, chains and trees, by two kinds of layers.  # [rows]"""
    size = like.block_tokens
    cache = KVCache([shape], NUM_BLOCKS + NUM_TOKENS // size, size, like.keys[0].dtype, like.device)
    random = torch.Generator(like.device).manual_seed(0)
    for pool in (*cache.keys, *cache.values):  # the blank block stays zero
        rows = torch.randn(pool[size:].shape, device=pool.device, generator=random)
        as_bits(pool[size:]).copy_(as_bits(as_stored(rows.to(_computed(pool.dtype)), pool.dtype)))
    kvs = [_sequence(cache, num_tokens) for num_tokens in (size + size // 4, size // 2, 2 * size, 3)]
    plain = flatten([StepRows(kv, [0]) for kv in kvs])
    ragged = flatten(
        [
            StepRows(kvs[0], [0] * 70),
            StepRows(kvs[1], [0], _tree(ROOT, 0, 1)),
            StepRows(kvs[2], [0, 0], _tree(ROOT, ROOT, 0, 1, 1)),
            StepRows(kvs[3], [], _tree(ROOT, ROOT, 1), num_cached_nodes=1),
        ]
    )
    sinks = torch.randn(HEADS_PER_KV_HEAD * shape.num_kv_heads, device=like.device, generator=random)
    scale = shape.key_dim**-0.5
    kinds = Attention(scale), Attention(scale, WINDOW, SOFTCAP, sinks)
    return torch.cat(
        [_errors_of_step(shape, cache, step, kernel, random, kind) for step in (plain, ragged) for kind in kinds]
    )


def _computed(dtype: torch.dtype) -> torch.dtype:
    """The type of a model that has KV of this type."""
    return torch.bfloat16 if dtype == FP8 else dtype


def _tree(*parents: int) -> TokenTree:
    return TokenTree(tuple(range(len(parents))), parents)


def _sequence(cache: KVCache, num_tokens: int) -> SequenceKV:
    kv = cache.new_sequence()
    cache.reserve(kv, num_tokens)
    cache.extend(kv, num_tokens)
    return kv


def _errors_of_step(
    shape: LayerShape, cache: KVCache, step: Step, kernel: Kernel, random: torch.Generator, kind: Attention
) -> Tensor:
    cache.reserve_all((span.kv, span.num_kv) for span in step.spans)
    num_rows = len(step.ids)
    like = cache.keys[0]
    sizes = (
        (HEADS_PER_KV_HEAD * shape.num_kv_heads, shape.key_dim),
        (shape.num_kv_heads, shape.key_dim),
        (shape.num_kv_heads, shape.value_dim),
    )
    query, key, value = (
        torch.randn(1, heads, num_rows, dim, dtype=_computed(like.dtype), device=like.device, generator=random)
        for heads, dim in sizes
    )
    if shape.values_in_keys:
        value = key[..., : shape.value_dim]
    *_, paged_plan = paged_inputs(step, cache, kernel, Tiling())
    gathering = plan_step(cache, step.spans, num_rows, Tiling())
    plans = (paged_plan, gathering)  # kernel first: it has to store the KV itself
    got, want = (kind.run_layer(0, plan, query, key, value)[0].flatten(1).float() for plan in plans)
    error: Tensor = torch.linalg.vector_norm(got - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
    return error
