"""The free memory of a device, and the number of KV blocks that fit into it.

Knows devices and the memory limits of this process. Must not know models, beyond their sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError, StartupError
from workers.step import NUM_OWN_BLOCKS, LayerShape

MAX_SLOTS = (1 << 31) - 1
"""Slots are numbered by 32-bit integers."""
MAX_BLOCKS = 1 << 18
"""Limit on the number of blocks, because the bookkeeping of each block takes memory."""
GIB = 1 << 30


class NoRoomForKV(StartupError):
    """The device has no memory for a single block; all ranks of a model raise it together."""


def free_bytes(device: torch.device, num_ranks: int = 1, root: Path = Path("/")) -> int | None:
    """Bytes that one of `num_ranks` processes may still allocate there; None where that is unknown.

    Ranks share a host's memory, which control groups, and so containers, may limit.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch caches counts as taken
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and (root / "proc/meminfo").exists():
        return min([_available(root), *_cgroup_headrooms(root)]) // num_ranks
    return None


def _available(root: Path) -> int:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Of each version of control groups: the files of the limit and of what is used, and the line of memory.stat that has
inactive page cache, which the kernel can reclaim."""


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Bytes below the limit, for each control group around this process that has one."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _headrooms(root / "sys/fs/cgroup", group, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _headrooms(root / "sys/fs/cgroup/memory", group, *_VERSION_1)


def _headrooms(top: Path, group: str, limit_file: str, current_file: str, inactive: str) -> Iterator[int]:
    folder = top / group.lstrip("/")  # a container may not see it, only those above it
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
) -> int:
    """The number of KV blocks: for `kv_cache_tokens` if set, else as many as the free memory holds.

    `all_min` returns the least of all ranks' numbers. Raises: NoRoomForKV; ConfigError where free memory is unknown.
    """
    if config.kv_cache_tokens is not None:
        return -(-config.kv_cache_tokens // config.block_tokens)
    device = torch.device(config.device)
    free = free_bytes(device, config.tensor_parallel)
    if free is None:
        raise ConfigError(f"the free memory of {device} is unknown on {sys.platform}: set kv_cache_tokens")
    of_token = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in layers) * dtype.itemsize
    num_tokens = min(int(free * config.kv_memory_share) // of_token, MAX_SLOTS)
    num_blocks = all_min(max(0, min(num_tokens // config.block_tokens - NUM_OWN_BLOCKS, MAX_BLOCKS)))
    if num_blocks < 1:
        raise NoRoomForKV(
            f"there is no room for KV: {free / GIB:.3g} GiB are free on {device}, kv_memory_share allows "
            f"{config.kv_memory_share:g} of them, and a block of {config.block_tokens} tokens takes "
            f"{of_token * config.block_tokens / GIB:.3g} GiB"
            + (" (if that is enough, then another rank has less)" if config.tensor_parallel > 1 else "")
        )
    return num_blocks
