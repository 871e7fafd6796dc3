"""Gumbel noise by key as one Triton kernel, with the same bits as `core.noise`.

Knows keys and Triton. Import it only where there is a GPU, because Triton comes only with torch for CUDA. Must not know
what the noise is used for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core import noise

BLOCKS = 256
"""Number of Philox blocks, of four numbers each, that one program of 128 threads computes. Chosen without a GPU."""
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""A fused multiply-add rounds once where `core.noise` rounds twice, which would change the last bit."""

_SQRT_HALF = tl.constexpr(noise.SQRT_HALF)
_LN_2 = tl.constexpr(noise.LN_2)
_ATANH_SERIES = tl.constexpr(noise.ATANH_SERIES)


def gumbel_rows(keys: Tensor, vocab_size: int) -> Tensor:
    """Float32 noise [R, vocab_size] of int64 keys (seed, position, row, purpose), on their device.  # keys [R, 4]"""
    numbers = torch.empty(len(keys), vocab_size, device=keys.device)
    grid = (len(keys), triton.cdiv(vocab_size, 4 * BLOCKS))
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]  # torch's own; Triton takes the current device
        _fill[grid](keys.contiguous(), numbers, vocab_size, BLOCKS, **LAUNCH)
    return numbers


@triton.jit(do_not_specialize=["vocab_size"])  # type: ignore[untyped-decorator]  # Triton's own, as below
def _fill(keys: tl.tensor, numbers: tl.tensor, vocab_size: tl.tensor, num_blocks: tl.constexpr) -> None:
    """Compiled once for all vocabulary sizes, so that the code compared at start is the code that runs later.

    Triton's Philox is the published one, with a 64-bit seed and a counter of 32-bit words.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_blocks
    seed = tl.load(keys + 4 * row)
    position = tl.load(keys + 4 * row + 1).to(tl.uint32)
    number = tl.load(keys + 4 * row + 2).to(tl.uint32)
    purpose = tl.load(keys + 4 * row + 3).to(tl.uint32)
    blocks = (first + tl.arange(0, num_blocks)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, blocks, position, number, purpose)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniforms = (bits.to(tl.float64) + 0.5) * 2.0**-32
    gumbel = _log(_log(uniforms) * -1.0) * -1.0
    ids = 4 * first + tl.arange(0, 4 * num_blocks)
    tl.store(numbers + row * vocab_size + ids, gumbel.to(tl.float32), mask=ids < vocab_size)


@triton.jit  # type: ignore[untyped-decorator]
def _log(x: tl.tensor) -> tl.tensor:
    """`core.noise.log` of normal positive numbers: the same operations in the same order."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_low = mantissa < tl.full((), _SQRT_HALF, tl.float64)  # in a comparison Triton rounds a constant to float32
    exponent = ((bits >> 52) - 1022 - is_low.to(tl.int64)).to(tl.float64)
    mantissa = tl.where(is_low, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * _ATANH_SERIES[6] + _ATANH_SERIES[5]
    for k in tl.static_range(4, -1, -1):
        series = series * z + _ATANH_SERIES[k]
    return s * series * 2.0 + exponent * _LN_2
