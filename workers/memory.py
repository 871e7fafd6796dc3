"""How much memory a device has left, and how much KV that makes.

Knows devices and what the kernel says of this process; must not know models, beyond the sizes of what they need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError, StartupError
from workers.kv_cache import NUM_OWN_BLOCKS, LayerShape

MAX_SLOTS = (1 << 31) - 1
"""What 32-bit integers can name."""
MAX_BLOCKS = 1 << 18
"""Millions of tokens; the books on each block take memory, too."""
GIB = 1 << 30


def free_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """What may still be taken there: of the host also as its control groups, and so its container, allow.

    Raises: ConfigError where nobody can tell.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself counts as taken
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and (root / "proc/meminfo").exists():
        return min([_available(root), *_left_in_groups(root)])
    raise ConfigError(f"nobody can tell how much memory is free on {device} of {sys.platform}: set kv_cache_tokens")


def _available(root: Path) -> int:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of each control group (version 2) around this process that has a limit; files that nobody reads make room."""
    top = root / "sys/fs/cgroup"
    named = [line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")]
    group = top / named[0].lstrip("/") if named else top
    for folder in (group, *group.parents):
        limit = _text(folder / "memory.max").strip()
        if limit.isdigit():
            counts = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            idle = int(counts.get("inactive_file", 0))
            yield int(limit) - int(_text(folder / "memory.current")) + idle
        if folder == top:
            return


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def num_kv_blocks(config: EngineConfig, layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Blocks of KV: for as many tokens as were asked for, or as there is memory for now.

    Raises: StartupError where there is no room for one.
    """
    if config.kv_cache_tokens is not None:
        return -(-config.kv_cache_tokens // config.block_tokens)
    device = torch.device(config.device)
    free = free_bytes(device)
    ranks_beside = config.tensor_parallel if device.type == "cpu" else 1  # which have the same memory
    of_token = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in layers) * dtype.itemsize
    num_tokens = min(int(free * config.kv_memory_share / ranks_beside) // of_token, MAX_SLOTS)
    num_blocks = min(num_tokens // config.block_tokens - NUM_OWN_BLOCKS, MAX_BLOCKS)
    if num_blocks < 1:
        raise StartupError(
            f"there is no room for KV: {free / GIB:.3g} GiB are free on {device}, of which kv_memory_share lets "
            f"{config.kv_memory_share:g} be taken, and a block of {config.block_tokens} tokens takes "
            f"{of_token * config.block_tokens / GIB:.3g}"
        )
    return num_blocks
