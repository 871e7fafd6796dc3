"""A device as a benchmark sees it: its name, a clock that waits for it, and how fast it reads its memory.

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
"""Of what is read: many times what any cache holds."""
NUM_LOOPS = 8
"""In a row, so that the launch of one hides behind the one before it."""


def open_device(name: str) -> torch.device:
    """The device as torch names it. Raises: StartupError where there is none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"torch {torch.__version__} finds no device {name}; try --device cpu with a small --size")
    return device


def device_name(device: torch.device) -> str:
    """The device's product name; of a CPU the kind alone."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def timed(device: torch.device, act: Callable[[], object]) -> float:
    """Seconds from a device that has nothing to do to one that has nothing to do any more."""
    _wait_for(device)
    began_s = time.perf_counter()
    act()
    _wait_for(device)
    return time.perf_counter() - began_s


def token_s(device: torch.device, complete: Callable[[int], object], num_tokens: int) -> float:
    """Seconds for each token after the first of `complete`, which takes a number of tokens."""
    one_s = timed(device, lambda: complete(1))
    return (timed(device, lambda: complete(1 + num_tokens)) - one_s) / num_tokens


def waits_per_token(device: torch.device, complete: Callable[[int], object], num_tokens: int) -> float:
    """How often Python waits for a GPU, for each token after the first: torch warns of it if it is asked to."""
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
    """Reading memory, or copying it, and doing nothing else: seconds per byte, by the quicker of the two."""
    memory, copy = (torch.ones(MEMORY_BYTES // 4, device=device) for _ in range(2))

    def measured() -> float:
        read_s = min(timed(device, lambda: _often(memory.sum)) for _ in range(3))
        copy_s = min(timed(device, lambda: _often(lambda: copy.copy_(memory))) for _ in range(3))
        return min(read_s, copy_s / 2) / (NUM_LOOPS * memory.nbytes)  # a copy reads each byte and writes it

    return measured


def _often(act: Callable[[], object]) -> None:
    for _ in range(NUM_LOOPS):
        act()
