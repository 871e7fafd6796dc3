"""Recorded code of a model gives the bits of that code; code that cannot be recorded runs as it is."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints
from tests.workers.runtime.test_runtime import in_all_ways, tokens
from workers.runtime import backends
from workers.runtime.backends import PackedBackend, TracedBackend, traced_cpu
from workers.runtime.runtime import ModelRuntime
from workers.step import StepRows

OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"deterministic": True}),  # with each product packed
    ("llama", {"dtype": "bfloat16"}),
    *((family, {}) for family in (*checkpoints.FAMILIES, "mixtral") if family != "llama"),
]
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
"""Positions are scaled anew where a step has one beyond those known."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else there may be for these settings."""
    monkeypatch.setattr(backends, "BACKENDS", (TracedBackend, PackedBackend))


def steps_of(runtime: ModelRuntime) -> list[torch.Tensor]:
    rng = random.Random(1)
    sequences = [tokens(rng, rng.randint(1, 60)) for _ in range(4)]
    return in_all_ways(runtime, sequences, [tokens(rng, 8) for _ in sequences])


def refuse(*_: Any, **__: Any) -> None:
    pytest.fail("the model's own code runs")


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS)]
)
def test_steps_of_all_kinds_have_the_bits_of_the_models_own_code(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = checkpoints.write(family, tmp_path)
    recorded, own = checkpoints.runtime(path, **settings), checkpoints.runtime(path, **settings)
    recorded.warm_up()
    own.context.tiling = recorded.context.tiling
    assert [type(backend) for backend in recorded.backends._built] == [TracedBackend]
    assert (recorded.backends.names, recorded.backends.is_compiled) == (own.backends.names, False)
    recorded.context.model.forward = refuse
    for got, want in zip(steps_of(recorded), steps_of(own), strict=True):
        assert torch.equal(got, want)
    recorded.cache.check_integrity()


def test_code_that_asks_what_was_computed_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would hold for steps like the one that was recorded."""
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path, **DYNAMIC))
    with caplog.at_level(logging.INFO, logger="workers.runtime"):
        runtime.warm_up()
    assert not runtime.backends._built
    assert f"{runtime.info.name} is run by its own code: " in caplog.text
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)
    assert runtime.forward([StepRows(runtime.cache.new_sequence(), [1, 2])]).isfinite().all()


def test_a_large_model_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_cpu, "MAX_WEIGHTS", 10)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path))
    runtime.warm_up()
    assert not runtime.backends._built


def test_recording_leaves_no_kv_behind_and_shares_the_weights(tmp_path: Path) -> None:
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path))
    num_free = runtime.cache.num_free_blocks
    runtime.warm_up()
    assert runtime.cache.num_free_blocks == num_free
    runtime.cache.check_integrity()
    row = StepRows(runtime.cache.new_sequence(), [1])
    before = runtime.forward([row])
    with torch.no_grad():
        runtime.context.model.model.layers[0].mlp.down_proj.weight.zero_()
    assert not torch.equal(runtime.forward([StepRows(runtime.cache.new_sequence(), [1])]), before)
