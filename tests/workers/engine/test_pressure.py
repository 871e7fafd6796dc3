"""Rows that a target computes again when sessions need more KV than there is, on real engines."""

from __future__ import annotations

import pytest

from core.config import EngineConfig
from tests.workers.engine.driving import EPOCH, Driver
from tests.workers.engine.pressure import press, prompts_of
from workers.engine.target import TargetEngine

pytestmark = pytest.mark.thorough
NUM_CLIENTS, NUM_OUTPUT = 6, 16
PROMPTS = prompts_of(12, low=20, high=50)
NEED = NUM_CLIENTS * (sum(map(len, PROMPTS)) / len(PROMPTS) + NUM_OUTPUT)
"""Tokens of KV that so many sessions have at their ends."""


@pytest.fixture
def load(checkpoint):
    def load(demand):
        config = EngineConfig(checkpoint, kv_cache_tokens=int(NEED / demand), block_tokens=8, deterministic=True)
        return TargetEngine.load(config, EPOCH, lambda _: None)

    return load


@pytest.fixture(scope="module")
def expected(checkpoint):
    engine = TargetEngine.load(EngineConfig(checkpoint, deterministic=True), EPOCH, lambda _: None)
    return {tuple(prompt): Driver(engine, prompt, session=f"{prompt}").run(NUM_OUTPUT) for prompt in PROMPTS}


def test_where_kv_suffices_nothing_is_computed_twice_and_nobody_waits(load, expected):
    pressure = press(load(0.7), PROMPTS, NUM_OUTPUT, NUM_CLIENTS)
    assert (pressure.num_recomputed, pressure.num_missing, pressure.num_preemptions) == (0, 0, 0)
    assert pressure.outputs == expected


@pytest.mark.parametrize(("demand", "num_orchestrators"), [(1.5, 1), (3.0, 1), (3.0, 2)])
def test_where_kv_is_short_the_newest_wait_and_little_is_computed_twice(load, expected, demand, num_orchestrators):
    """Where any prompt preempted the newest idle session, 6 to 29 tokens were computed again for each of the output."""
    pressure = press(load(demand), PROMPTS, NUM_OUTPUT, NUM_CLIENTS, num_orchestrators)
    assert pressure.outputs == expected, "no token is lost, doubled or changed"
    assert pressure.num_recomputed <= 1.0 * pressure.num_output
    assert pressure.num_preemptions <= len(PROMPTS) * 2
