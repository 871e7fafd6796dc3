"""Adapters on the simulated GPU: the text is the CPU's, the host waits once a step, and other steps stay recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.records import Adapter
from tests import checkpoints
from tests.adapters import write_adapter
from tests.simulated_gpu.device import SimulatedGPU
from tests.simulated_gpu.test_engines_on_a_simulated_gpu import prompt, step_counts, target_on
from tests.workers.engine.driving import Driver, chain

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint and two adapters of it."""
    root = tmp_path_factory.mktemp("qwen3")
    base = checkpoints.write("qwen3", root / "base")
    return [
        base,
        write_adapter(root / "a", base, 1),
        write_adapter(root / "b", base, 2, ("q_proj", "up_proj", "lm_head")),
    ]


def drivers_of(paths: list[Path], device: str, **settings: Any) -> list[Driver]:
    """Sessions of two adapters and of none, in turn."""
    engine = target_on(paths[0], device, **settings)
    found = [None, *(engine.add_adapter(engine.read_adapter(Adapter(each.name, str(each)))) for each in paths[1:])]
    drivers = [Driver(engine, prompt(index), session=str(index)) for index in range(4)]
    for index, driver in enumerate(drivers):
        driver.spec = replace(driver.spec, adapter=found[index % 3])
    return drivers


def texts(drivers: list[Driver]) -> list[list[int]]:
    for block in (chain(), chain(1, 2), chain(), chain(3)):
        for driver in drivers:
            driver.verify(block)
    return [list(driver.log.tokens) for driver in drivers]


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"compile": True}, marks=pytest.mark.slow), {"compile": True, "deterministic": True}],
    ids=str,
)
def test_a_target_writes_what_it_writes_on_a_cpu(
    settings: dict[str, Any], gpu: SimulatedGPU, paths: list[Path]
) -> None:
    assert texts(drivers_of(paths, "cuda", **settings)) == texts(drivers_of(paths, "cpu"))


def test_a_step_with_adapters_waits_once_and_one_without_is_recorded(gpu: SimulatedGPU, paths: list[Path]) -> None:
    drivers = drivers_of(paths, "cuda", compile=True)
    for driver in drivers:
        driver.verify()
    mixed = step_counts(gpu, drivers)
    assert (len(mixed.waits), mixed.replays) == (1, 0)
    plain = step_counts(gpu, drivers[::3])
    assert (plain.uploads, len(plain.waits), plain.replays) == (1, 1, 1)
