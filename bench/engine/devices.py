"""Helpers for a device: its name, timing that waits for its work, and the speed of reading its memory.

Knows torch and CUDA; must not know models or engines.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable

import torch

from core.errors import StartupError

MEMORY_BYTES = 1 << 30
"""Amount of memory to read, many times the size of any cache."""
NUM_LOOPS = 8
"""Number of reads in a row, so that each launch is hidden behind the read before it."""


def open_device(name: str) -> torch.device:
    """Return the device with torch's name `name`. Raises: StartupError if there is none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"torch {torch.__version__} finds no device {name}; try --device cpu with a small --size")
    return device


def device_name(device: torch.device) -> str:
    """Product name of the device; for a CPU only its architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def timed(device: torch.device, act: Callable[[], object]) -> float:
    """Seconds that `act` takes, including the work it leaves on the device."""
    _wait_for(device)
    began_s = time.perf_counter()
    act()
    _wait_for(device)
    return time.perf_counter() - began_s


def token_s(device: torch.device, complete: Callable[[int], object], num_tokens: int) -> float:
    """Seconds per token after the first. `complete` takes a number of tokens."""
    one_s = timed(device, lambda: complete(1))
    return (timed(device, lambda: complete(1 + num_tokens)) - one_s) / num_tokens


def waits_per_token(device: torch.device, complete: Callable[[int], object], num_tokens: int) -> float:
    """Number of times that Python waits for the GPU per token after the first, by torch's synchronization warnings."""
    return (_num_waits(device, lambda: complete(1 + num_tokens)) - _num_waits(device, lambda: complete(1))) / num_tokens


def _num_waits(device: torch.device, act: Callable[[], object]) -> int:
    _wait_for(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":  # a CPU is done when the call returns
        torch.cuda.synchronize(device)


def memory_loop(device: torch.device) -> Callable[[], float]:
    """A function that measures seconds per byte of memory, by reading and by copying; the faster one counts."""
    memory, copy = (torch.ones(MEMORY_BYTES // 4, device=device) for _ in range(2))

    def measured() -> float:
        read_s = min(timed(device, lambda: _often(memory.sum)) for _ in range(3))
        copy_s = min(timed(device, lambda: _often(lambda: copy.copy_(memory))) for _ in range(3))
        return min(read_s, copy_s / 2) / (NUM_LOOPS * memory.nbytes)  # a copy reads each byte and writes it

    return measured


def _often(act: Callable[[], object]) -> None:
    for _ in range(NUM_LOOPS):
        act()
