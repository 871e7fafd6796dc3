"""Free memory of a device, and the number of KV blocks that fit into it.

Knows devices and the memory limits of this process. Must not know models, beyond their sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from core.config import EngineConfig
from core.errors import ConfigError, StartupError
from workers.attention import LayerProbe
from workers.step import NUM_OWN_BLOCKS, LayerShape

MAX_SLOTS = (1 << 31) - 1
"""Slots are numbered by 32-bit integers."""
MAX_BLOCKS = 1 << 18
"""Limit on the number of blocks, because the bookkeeping of each block takes memory."""
MIN_STATES = 128
"""Smallest number of recurrent states: a sequence takes three, and one for each guess."""
USUAL_STATES, USUAL_STATE_BYTES = 256 * 35, 1 << 28
"""Number of recurrent states for as many sessions as a replica takes by default, with as many guesses as a block has by
default. Where `kv_cache_tokens` is set there are as many, as far as they take no more than this memory."""
MAX_STATES = 1 << 16
"""Limit on the number of recurrent states, for the same reason as for blocks."""
GIB = 1 << 30
CONTEXT_BYTES = GIB
"""GPU memory of CUDA's context, libraries and loaded kernels, which torch does not count."""


class NoRoomForKV(StartupError):
    """The device has no memory for a single block. All ranks of a model raise it together."""


def free_bytes(device: torch.device, num_ranks: int = 1, root: Path = Path("/")) -> int | None:
    """Bytes that each of `num_ranks` processes may still allocate on the device; None if unknown.

    Ranks share the host's memory. Control groups, and so containers, may limit it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches would count as taken
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and (root / "proc/meminfo").exists():
        return min([_available(root), *_cgroup_headrooms(root)]) // num_ranks
    return None


def _available(root: Path) -> int:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""For each version of control groups: the files with the limit and the usage, and the line of memory.stat with inactive
page cache, which the kernel can reclaim."""


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Bytes left below the limit, for each control group of this process that has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _headrooms(root / "sys/fs/cgroup", group, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _headrooms(root / "sys/fs/cgroup/memory", group, *_VERSION_1)


def _headrooms(top: Path, group: str, limit_file: str, current_file: str, inactive: str) -> Iterator[int]:
    folder = top / group.lstrip("/")  # a container may see only folders above it
    for each in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
        limit = _text(each / limit_file).strip()
        if limit.isdigit():
            counts = dict(line.split() for line in _text(each / "memory.stat").splitlines())
            yield int(limit) - int(_text(each / current_file)) + int(counts.get(inactive, 0))


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def num_kv_blocks(
    config: EngineConfig,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    all_min: Callable[[int], int] = int,
    taken_bytes: Callable[[], int] = int,
    state_bytes: int = 0,
    beside_bytes: int = 0,
    num_local: int = 1,
) -> int:
    """Number of KV blocks: for `kv_cache_tokens` if set, else as many as fit into memory.

    `all_min` returns the smallest of all ranks' numbers. `taken_bytes` returns the bytes that this process takes on a
    GPU besides KV. A recurrent state takes `state_bytes`; half of the memory is left for states. `beside_bytes`: what
    else is stored for each token in the same memory. `num_local`: number of ranks that share the host's memory.
    Raises: NoRoomForKV; ConfigError if free memory is unknown.
    """
    if config.kv_cache_tokens is not None:
        return -(-config.kv_cache_tokens // config.block_tokens)
    allowed, reason = _kv_bytes(config, taken_bytes, num_local)
    if state_bytes:
        allowed = min(allowed // 2, allowed - MIN_STATES * state_bytes)
        reason += f", {MIN_STATES} recurrent states take {MIN_STATES * state_bytes / GIB:.3g}"
    of_token = max(1, token_bytes(layers, dtype) + beside_bytes)
    num_tokens = min(allowed // of_token, MAX_SLOTS)
    num_blocks = all_min(max(0, min(num_tokens // config.block_tokens - NUM_OWN_BLOCKS, MAX_BLOCKS)))
    if num_blocks < 1:
        raise NoRoomForKV(
            f"there is no room for KV: {reason}, and a block of {config.block_tokens} tokens takes "
            f"{of_token * config.block_tokens / GIB:.3g} GiB"
            + (" (if that is enough, then another rank has less)" if config.num_ranks > 1 else "")
        )
    return num_blocks


def token_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of KV that a token takes."""
    return sum(shape.num_stored for shape in layers) * dtype.itemsize


def num_states(
    config: EngineConfig,
    state_bytes: int,
    kv_bytes: int,
    all_min: Callable[[int], int] = int,
    taken_bytes: Callable[[], int] = int,
    num_local: int = 1,
) -> int:
    """Number of recurrent states, within limits; 0 if a state takes nothing. Arguments as of `num_kv_blocks`.

    As many as fit into the memory that KV leaves. If `kv_cache_tokens` is set, as many as take the memory of the KV, or
    the usual number if these take little.
    """
    if not state_bytes:
        return 0
    if config.kv_cache_tokens is None:
        found = (_kv_bytes(config, taken_bytes, num_local)[0] - kv_bytes) // state_bytes
    else:
        found = max(kv_bytes // state_bytes, min(USUAL_STATES, USUAL_STATE_BYTES // state_bytes))
    return all_min(min(max(MIN_STATES, found), MAX_STATES))


def _kv_bytes(config: EngineConfig, taken_bytes: Callable[[], int], num_local: int) -> tuple[int, str]:
    """Bytes that KV may take, and the reason for the limit.

    On a GPU `kv_memory_share` is a share of the total memory. A share of the free memory would depend on how far other
    engines on the GPU have started.
    """
    device, share = torch.device(config.device), config.kv_memory_share
    if device.type == "cuda":
        taken = taken_bytes() + CONTEXT_BYTES
        free, total = free_bytes(device) or 0, torch.cuda.mem_get_info(device)[1]
        reason = (
            f"kv_memory_share allows {share:g} of the {total / GIB:.3g} GiB of {device}, weights and a step of "
            f"{config.max_step_tokens} rows take {taken / GIB:.3g}, and {free / GIB:.3g} are free"
        )
        return min(int(total * share) - taken, free), reason
    free_on_host = free_bytes(device, num_local)
    if free_on_host is None:
        raise ConfigError(f"the free memory of {device} is unknown on {sys.platform}: set kv_cache_tokens")
    reason = f"{free_on_host / GIB:.3g} GiB are free on {device}, kv_memory_share allows {share:g} of them"
    return int(free_on_host * share), reason


@torch.inference_mode()
def bytes_beside_kv(model: Any, config: EngineConfig) -> int:
    """Bytes that weights and the largest step take on a GPU.

    The largest step has `max_step_tokens` rows, all of them verified; attention is not included. Recorded steps keep
    the same amount again.
    """
    device = torch.device(config.device)
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    rows = torch.zeros(1, config.max_step_tokens, dtype=torch.int64, device=device)
    wanted = torch.arange(config.max_step_tokens, device=device)
    model(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=wanted, plan=LayerProbe()).logits.float()
    step = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    return weights + step * (2 if config.compile else 1)
