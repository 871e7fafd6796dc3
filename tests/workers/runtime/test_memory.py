"""How much is free is read off what the kernel says, and KV takes its share of it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError, StartupError
from tests import checkpoints
from workers.runtime import memory
from workers.runtime.memory import MAX_BLOCKS, MIN_STATES, USUAL_STATES, free_bytes, num_kv_blocks, num_states
from workers.step.kv_cache import NUM_OWN_BLOCKS, KVCache, LayerShape

CPU, CARD = torch.device("cpu"), torch.device("cuda")
LAYERS = (LayerShape(2, 8, 8), LayerShape(1, 8, 24))  # 64 numbers for a token


def host(root: Path, available_kib: int, group: str = "/") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    return root


def limit(folder: Path, most: str, current: int = 0, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_a_host_without_limits_has_what_is_available(tmp_path: Path) -> None:
    assert free_bytes(CPU, root=host(tmp_path, 1000)) == 1000 * 1024


@pytest.mark.parametrize("group", ["/", "/pods/one"])
def test_the_narrowest_group_around_the_process_counts(group: str, tmp_path: Path) -> None:
    """With what the kernel would drop of files; a group without a limit has none."""
    root = host(tmp_path, 1000, group)
    top = root / "sys/fs/cgroup"
    limit(top, "max")
    limit(top / "pods", "700000", current=200_000, inactive_file=50_000)
    limit(top / "pods/one", "600000", current=10)
    limit(top / "elsewhere", "1")
    assert free_bytes(CPU, root=root) == (1_024_000 if group == "/" else 550_000)


def test_groups_of_the_first_version_count_as_well(tmp_path: Path) -> None:
    """In a container the path of its group leads nowhere, and the top is its own."""
    root = host(tmp_path, 1000)
    (root / "proc/self/cgroup").write_text("3:cpu,memory:/kubepods/x\n2:cpu:/kubepods/x\n")
    top = root / "sys/fs/cgroup/memory"
    top.mkdir(parents=True)
    (top / "memory.limit_in_bytes").write_text("300000\n")
    (top / "memory.usage_in_bytes").write_text("100000\n")
    (top / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 20\n")
    assert free_bytes(CPU, root=root) == 200_020


def test_ranks_share_a_host(tmp_path: Path) -> None:
    assert free_bytes(CPU, 4, host(tmp_path, 1000)) == 256_000


def test_this_host_says_what_it_has() -> None:
    assert 1 << 20 < (free_bytes(CPU) or 0) < 1 << 50


def test_a_card_is_asked_after_torch_has_given_back_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (70, 80))
    assert free_bytes(CARD) == 70
    assert asked == ["empty", CARD]


def test_where_nobody_can_tell_a_number_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes(CPU, root=tmp_path) is None
    monkeypatch.setattr(memory, "free_bytes", lambda *_: None)
    with pytest.raises(ConfigError, match="set kv_cache_tokens"):
        num_kv_blocks(EngineConfig("m", kv_cache_tokens=None), LAYERS, torch.float32)


@pytest.mark.parametrize(
    ("settings", "dtype", "want"),
    [
        ({"kv_cache_tokens": 33}, torch.float32, 3),  # whole blocks of what was asked for
        ({}, torch.float32, 204 - NUM_OWN_BLOCKS),  # 1 MiB x 0.8 / (64 x 4 x 16) = 204.8
        ({}, torch.bfloat16, 409 - NUM_OWN_BLOCKS),
        ({"kv_memory_share": 0.5}, torch.float32, 128 - NUM_OWN_BLOCKS),
    ],
)
def test_kv_takes_its_share_in_whole_blocks(
    settings: dict[str, Any], dtype: torch.dtype, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1 << 20)
    config = EngineConfig(**{"model": "m", "kv_cache_tokens": None, "block_tokens": 16} | settings)
    assert num_kv_blocks(config, LAYERS, dtype) == want


@pytest.mark.parametrize(
    ("settings", "kv_bytes", "want"),
    [
        ({}, 30_000, 224),  # of 0.8 MiB what KV leaves
        ({}, 0, 233),  # all of it, without attention
        ({}, 800_000, MIN_STATES),
        ({"kv_cache_tokens": 64}, 3600 * 10_000, 10_000),  # as much memory as KV takes
        ({"kv_cache_tokens": 64}, 0, USUAL_STATES),  # which take little
    ],
)
def test_states_take_what_kv_leaves_or_as_much_as_kv(
    settings: dict[str, Any], kv_bytes: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1 << 20)
    config = EngineConfig(**{"model": "m", "kv_cache_tokens": None} | settings)
    assert num_states(config, 3600, kv_bytes) == want
    assert num_states(config, 0, kv_bytes) == 0
    assert num_states(EngineConfig("m"), 1 << 30, 0) == MIN_STATES


def test_what_is_stored_beside_kv_keeps_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1 << 20)
    config = EngineConfig("m", kv_cache_tokens=None, block_tokens=16)
    of_kv = memory.token_bytes(LAYERS, torch.bfloat16)
    twice = num_kv_blocks(config, LAYERS, torch.bfloat16, beside_bytes=of_kv)
    assert twice == num_kv_blocks(config, LAYERS, torch.float32)


def test_no_more_blocks_than_anybody_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1 << 50)
    assert num_kv_blocks(EngineConfig("m", kv_cache_tokens=None), LAYERS, torch.float32) == MAX_BLOCKS


def test_it_is_said_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 10_000)
    with pytest.raises(StartupError, match=r"there is no room for KV: 9\.31e-06 GiB are free on cpu"):
        num_kv_blocks(EngineConfig("m", kv_cache_tokens=None), LAYERS, torch.float32)


def card(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 100 << 30) -> EngineConfig:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    return EngineConfig("m", device="cuda", kv_cache_tokens=None, kv_memory_share=0.5, block_tokens=1 << 16)


@pytest.mark.parametrize("taken_by_others", [0, 10 << 30, 49 << 30])
def test_on_a_card_kv_does_not_depend_on_how_far_others_are(
    taken_by_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = card(monkeypatch, free=(80 << 30) - taken_by_others)
    num_blocks = num_kv_blocks(config, LAYERS, torch.float32, taken_bytes=lambda: 20 << 30)
    bytes_of_block = 64 * 4 * config.block_tokens
    assert num_blocks == (29 << 30) // bytes_of_block - NUM_OWN_BLOCKS, "half of 100, less 20 and a context"


def test_on_a_card_that_is_full_the_start_says_what_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = card(monkeypatch, free=1 << 20)
    with pytest.raises(
        StartupError,
        match=r"allows 0.5 of the 100 GiB of cuda, weights and a step of 512 rows take 21, and 0.000977 are free",
    ):
        num_kv_blocks(config, LAYERS, torch.float32, taken_bytes=lambda: 20 << 30)


def test_an_engine_tells_what_it_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1 << 20)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), kv_cache_tokens=None)
    held = sum(pool.nbytes for pool in (*runtime.cache.keys, *runtime.cache.values))
    assert 0.75 * (1 << 20) < held <= 0.8 * (1 << 20)
    assert runtime.info.kv_cache_tokens == runtime.cache.num_blocks * runtime.cache.block_tokens


def test_memory_of_a_host_is_taken_as_it_is_used() -> None:
    """Half a gigabyte of KV of which next to nothing is written."""
    cache = KVCache([LayerShape(8, 64, 64)], 1 << 13, 32, torch.bfloat16, CPU)
    pools = [*cache.keys, *cache.values]
    assert sum(pool.nbytes for pool in pools) > 1 << 29
    assert not cache.keys[0][-1].any()
    assert all(pool.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0 for pool in pools), "pages of their own"
    assert sum(map(resident_bytes, pools)) < 1 << 26


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's pages that are in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = tensor.data_ptr() // page * page
    num_pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // page)
    is_there = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * page), is_there) == 0, ctypes.get_errno()
    return page * sum(flag & 1 for flag in is_there)
