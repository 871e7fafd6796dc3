"""Deterministic experts compute what transformers' do, or say why they cannot be had."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.errors import ConfigError
from tests import checkpoints
from tests.workers.runtime.test_runtime import assert_same, eager_logits, tokens
from workers.model.experts.tiled import compute_in_tiles
from workers.runtime import runtime as runtime_module
from workers.step.rows import StepRows


@pytest.mark.parametrize("family", checkpoints.EXPERTS)
def test_tiles_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    runtime = checkpoints.runtime(checkpoints.write(family, tmp_path), deterministic=True)
    text = tokens(random.Random(family), 40)
    got = runtime.forward([StepRows(runtime.cache.new_sequence(), text)])
    assert_same(got[-1], eager_logits(checkpoints.build(family), text)[-1])


def test_they_are_run_by_the_models_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A recording would compute the experts of its example only."""
    runtime = checkpoints.runtime(checkpoints.write("mixtral", tmp_path), deterministic=True)
    with caplog.at_level(logging.INFO):
        runtime.warm_up()
    assert "experts in tiles cannot be recorded" in caplog.text


def test_a_gpu_is_refused() -> None:
    mixture = SimpleNamespace(modules=lambda: [SimpleNamespace(_is_expert_parallel=False)], device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="deterministic cannot be had on cuda with SimpleNamespace"):
        compute_in_tiles(mixture)


def test_a_mixture_without_tiles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = checkpoints.runtime(checkpoints.write("mixtral", tmp_path), deterministic=True)
    monkeypatch.setattr(runtime_module, "find_tile_rows", lambda *_: None)
    with pytest.raises(ConfigError, match="deterministic cannot be had with MixtralForCausalLM, a mixture of experts"):
        runtime.warm_up()
