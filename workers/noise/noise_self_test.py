"""Decides whether the Triton noise kernel can be used on a GPU: compares its bits with those of `core.noise`.

The tests of this project do not run on a GPU. Each engine therefore compares a few rows when it starts, and computes
noise by torch's operators if a bit differs. Must not know what the noise is used for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from core import noise
from core.errors import first_line
from core.noise import Purpose
from workers.step import upload

logger = logging.getLogger(__name__)

Kernel: TypeAlias = Callable[[Tensor, int], Tensor]
"""(keys [R, 4], vocab_size) -> noise [R, vocab_size]."""

KEYS = (
    noise.key(0, 0, 0, Purpose.SHARED),
    noise.key(2**64 - 1, 2**32 - 1, noise.row_of(3, 5), Purpose.DRAFT),
    noise.key(2**63, 2**31, 7, Purpose.RESIDUAL),
    noise.key(0x0123456789ABCDEF, 4_095, 1, Purpose.GUESS),
)
VOCAB_SIZE = 50_001
"""A row of this length takes many programs of the kernel, and the last one is not full."""


@cache
def find_noise_kernel(device: torch.device) -> Kernel | None:
    """Return the noise kernel for this device; None if operators compute noise. On a GPU the log says why."""
    return checked(_by_triton, device) if device.type == "cuda" else None


def checked(kernel: Kernel, device: torch.device) -> Kernel | None:
    """Return the kernel if its bits are right on this device; otherwise log a warning and return None."""
    reason = difference(kernel, device)
    if reason is None:
        return kernel
    logger.warning("noise is computed by single operators, so that sampling on %s takes longer: %s", device, reason)
    return None


def difference(kernel: Kernel, device: torch.device) -> str | None:
    """Why the kernel's noise differs from that of `core.noise`; None if it has the same bits."""
    try:
        found = kernel(upload(list(KEYS), device), VOCAB_SIZE).cpu()
    except Exception as error:  # noqa: BLE001  Triton, the driver and the C compiler raise errors of their own
        return f"{type(error).__name__}: {first_line(error)}"
    expected = noise.gumbel_rows(KEYS, VOCAB_SIZE)
    return None if found.numpy().tobytes() == expected.tobytes() else "the kernel has other bits than core.noise"


def _by_triton(keys: Tensor, vocab_size: int) -> Tensor:
    from workers.noise.triton_noise import gumbel_rows  # Triton comes with torch for CUDA alone

    return gumbel_rows(keys, vocab_size)
