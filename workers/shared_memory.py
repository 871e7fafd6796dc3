"""Number of loads that a Triton kernel keeps in flight, limited by the GPU's shared memory.

Knows devices; must not know kernels. An H100 has 227 KiB per program, an L4 has 99 KiB.
"""

from __future__ import annotations

from functools import cache

import torch

SHARE = 0.85
"""Usable share of the shared memory; the compiler needs the rest for other buffers."""


def num_stages(device: torch.device, stage_bytes: int, wanted: int) -> int:
    """Return the number of stages of `stage_bytes` that fit, from 1 to `wanted`."""
    if device.type != "cuda":
        return wanted
    return max(1, min(wanted, int(SHARE * _limit(device)) // stage_bytes))


@cache
def _limit(device: torch.device) -> int:
    from triton.runtime import driver  # Triton is installed with torch for CUDA

    number = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])
