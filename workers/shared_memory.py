"""How many loads a Triton kernel may keep in flight: as many as the GPU's shared memory has room for.

Knows devices; must not know kernels. A large GPU has 227 KiB for a program, an L4 99.
"""

from __future__ import annotations

from functools import cache

import torch

SHARE = 0.85
"""Of the shared memory; the rest is for what a compiler stages beside the loads."""


def num_stages(device: torch.device, stage_bytes: int, wanted: int) -> int:
    """The number of stages of `stage_bytes` each that fit, at least 1 and at most `wanted`."""
    if device.type != "cuda":
        return wanted
    return max(1, min(wanted, int(SHARE * _limit(device)) // stage_bytes))


@cache
def _limit(device: torch.device) -> int:
    from triton.runtime import driver  # Triton comes with torch for CUDA

    number = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])
