"""Each kernel on a GPU against its reference: attention over block tables, products in tiles, noise.

Knows kernels; must not know models.
"""

from __future__ import annotations

from typing import Final

import torch

from bench.results import Result, at_most
from workers.attention import find_difference
from workers.noise import find_noise_kernel
from workers.products.triton_product import product
from workers.step import KVCache, LayerShape

SHAPES: Final = (LayerShape(8, 128, 128), LayerShape(2, 64, 64), LayerShape(4, 256, 256), LayerShape(2, 192, 128))
"""Shapes of Llama, Qwen's small models, Gemma and DeepSeek."""
BLOCK_TOKENS: Final = (16, 64, 256)
PRODUCTS: Final = ((1, 4096, 4096), (8, 6144, 4096), (16, 1000, 896), (40, 4096, 14336))
"""(rows, outputs, inputs)."""


def kernel_results() -> list[Result]:
    """Largest errors relative to a row's norm; and whether noise is equal to `core.noise` bit for bit."""
    from workers.attention.triton_attention import TritonKernel

    device = torch.device("cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            caches = [KVCache([shape], 1, size, dtype, device) for size in BLOCK_TOKENS]
            errors = [find_difference(cache, TritonKernel()) for cache in caches]
            name = f"attention, {shape.num_kv_heads} heads of {shape.key_dim}, {str(dtype).removeprefix('torch.')}"
            results.append(at_most(0.05 if dtype == torch.bfloat16 else 1e-3, Result(name, max(errors), "error")))
    results += [_of_product(device, *case) for case in PRODUCTS]
    results.append(at_most(0.0, _unlike_rows(device)))
    has_noise = find_noise_kernel(device) is not None
    results.append(at_most(0.0, Result("noise: rows with other bits", float(not has_noise), "rows")))
    return results


def _unlike_rows(device: torch.device) -> Result:
    """Number of rows of a product whose bits depend on the number of rows."""
    rows, weight = (torch.randn(count, 4096, device=device, dtype=torch.bfloat16) for count in (300, 1000))
    want = torch.cat([product(row[None], weight, None) for row in rows])
    counts = (2, 17, 40, 100, 300)
    unlike = [(product(rows[:count], weight, None) != want[:count]).any(1).sum().item() for count in counts]
    return Result("product: rows whose bits depend on their number", float(sum(unlike)), "rows")


def _of_product(device: torch.device, num_rows: int, num_outputs: int, num_inputs: int) -> Result:
    random = torch.Generator(device).manual_seed(0)
    rows, weight = (
        torch.randn(count, num_inputs, device=device, dtype=torch.bfloat16, generator=random)
        for count in (num_rows, num_outputs)
    )
    want = rows.double() @ weight.double().T
    errors = (product(rows, weight, None).double() - want).norm(dim=1) / want.norm(dim=1)
    name = f"product of {num_rows} rows, {num_inputs} to {num_outputs}"
    return at_most(0.01, Result(name, round(float(errors.max()), 6), "error"))
