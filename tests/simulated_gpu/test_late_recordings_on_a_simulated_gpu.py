"""Shapes recorded after the start, by engines on the simulated GPU: what is written does not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.speculation import EMPTY_BLOCK
from tests import checkpoints
from tests.simulated_gpu.device import SimulatedGPU
from tests.simulated_gpu.test_engines_on_a_simulated_gpu import (
    prompt,
    settings,
    step_counts,
    target_on,
    verify_together,
)
from tests.workers.engine.driving import EPOCH, Driver, chain
from workers.engine.target import TargetEngine
from workers.runtime.backends import cuda_graph

pytestmark = pytest.mark.thorough

BLOCKS = (EMPTY_BLOCK, chain(1, 2, 3, 4, 5), EMPTY_BLOCK, chain(7, 8), EMPTY_BLOCK)
"""Blocks of each of three sessions: steps of 3, 18, 3, 9 and 3 rows, after their prompts."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


def engine_of(path: Path) -> TargetEngine:
    return target_on(path, "cuda", compile=True, max_step_tokens=32)


def texts(engine: TargetEngine, between: Callable[[], object], name: str) -> list[list[int]]:
    """What three sessions write, if `between` is called between their steps."""
    drivers = [Driver(engine, prompt(seed, 6), session=f"{name} {seed}") for seed in range(3)]
    for block in BLOCKS:
        between()
        verify_together(drivers, [block] * 3)
    engine.check_integrity()
    engine.release([driver.session for driver in drivers])
    return [list(driver.log.tokens) for driver in drivers]


def test_text_is_the_same_before_while_and_after_shapes_are_recorded(gpu: SimulatedGPU, llama: Path) -> None:
    engine = engine_of(llama)
    before = texts(engine, lambda: None, "before")
    while_recording = texts(engine, lambda: engine.build_more(is_idle=True), "while")
    while engine.build_more(is_idle=True):
        pass
    after = texts(engine, lambda: None, "after")
    assert before == while_recording == after == texts(target_on(llama, "cpu"), lambda: None, "cpu")
    assert engine.stats().num_eager_steps == 0


def test_a_step_of_a_shape_that_is_not_recorded_is_a_replay_of_a_larger_one(
    gpu: SimulatedGPU, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = list[int]()

    def record(work: Any) -> Callable[[], None]:
        recordings.append(work.args[0].num_rows)
        return gpu.record(work)

    monkeypatch.setattr(cuda_graph, "CudaRecorder", lambda _: record)
    engine = engine_of(llama)
    assert recordings == [32, 16, 8, 4, 4, 2, 1]
    drivers = [Driver(engine, prompt(seed, 6), session=str(seed)) for seed in range(3)]
    verify_together(drivers, [EMPTY_BLOCK] * 3)
    for _ in range(2):
        counts = step_counts(gpu, drivers, chain(1, 2, 3, 4, 5))
        assert (counts.uploads, len(counts.waits), counts.replays) == (1, 1, 1)
        while engine.build_more(is_idle=True):
            pass
    assert sorted(recordings[7:]) == [2, 8, 16, 24, 24, 32]


def test_kv_has_its_memory_before_anything_is_recorded(
    gpu: SimulatedGPU, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as a step takes is left for recordings, whenever they are made."""
    taken = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, int(1.3 * (1 << 30))))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(cuda_graph, "CudaRecorder", lambda _: pytest.fail("recorded before KV is there"))
    for compiled in (False, True):
        config = settings(llama, "cuda", compile=compiled, kv_cache_tokens=None, max_step_tokens=32)
        engine = TargetEngine.load(config, EPOCH, lambda _: None)
        taken.append(engine.info.kv_cache_tokens)
    of_token = sum(shape.num_stored for shape in engine._runtime.cache.shapes) * 4
    assert (taken[0] - taken[1]) * of_token == pytest.approx(2 << 20, abs=32 * of_token)
