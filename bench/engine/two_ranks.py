"""Two ranks of a tiny model as two threads of one process: are their logits those of one rank?

A thread waits for the other in each collective, so that a rank that makes another call than the other shows, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import StartupError
from workers.model import ModelShard, loader
from workers.runtime import ModelRuntime

SIZE: Final = 2
WAIT_S: Final = 60.0
WAYS: Final = {"yes": False, "by whole experts": True}
"""Answer to print if two ranks are right, and whether each had whole experts."""


class ThreadCollectives:
    """Collectives of one of the threads; `slots` and `barrier` are common to both."""

    exchange: Final = None

    def __init__(self, index: int, slots: list[Tensor], barrier: threading.Barrier) -> None:
        self._index, self._slots, self._barrier = index, slots, barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        first, second = self._gather(tensor)
        return first + second

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._gather(tensor), dim=-1)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self._index] = tensor.clone()
        self._barrier.wait()
        found = [slot.clone() for slot in self._slots]
        self._barrier.wait()
        return found


def on_two_ranks(path: Path, difference: Callable[[ModelRuntime], float], tolerance: float) -> tuple[str, float]:
    """How two ranks can share the checkpoint, or why not; and their largest difference."""
    said, worst = [], 0.0
    for what, by_expert in WAYS.items():
        config = EngineConfig(str(path), kv_cache_tokens=2048, tensor_parallel=SIZE, expert_parallel=by_expert)
        try:
            worst = max(worst, *_differences(config, difference))
        except StartupError as error:
            if not by_expert:
                return f"no: {error}".replace("; serve it on one rank", "").replace(f"{path}", "it"), 0.0
        else:
            said.append(what)
    return ", ".join(said) if worst <= tolerance else f"off by {worst:.0e}", worst


def _differences(config: EngineConfig, difference: Callable[[ModelRuntime], float]) -> list[float]:
    """Each rank's difference. Raises: StartupError."""
    loader.check_checkpoint(config)
    barrier, slots = threading.Barrier(SIZE, timeout=WAIT_S), [torch.empty(0)] * SIZE
    runtimes = []
    for index in range(SIZE):
        shard = ModelShard(index, SIZE, config.expert_parallel)
        runtimes.append(ModelRuntime(loader.load(config, lambda _: None, shard), config))
        shard.connect(ThreadCollectives(index, slots, barrier))
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(difference, runtimes))
