"""A program computes what the model does, row by row, and what no program expresses is run by the model's own code."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from tests import checkpoints
from tests.workers.runtime.test_runtime import assert_same, eager_logits, in_all_ways, tokens
from workers.runtime.backends import ProgramBackend
from workers.runtime.runtime import ModelRuntime
from workers.step import StepRows

FAMILIES = [*(family for family in checkpoints.FAMILIES if family != "gpt2"), "opt"]


def sequences() -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(1)
    seqs = [tokens(rng, rng.randint(1, 60)) for _ in range(4)]
    return seqs, [tokens(rng, 8) for _ in seqs]


def steps_of(runtime: ModelRuntime) -> list[torch.Tensor]:
    return in_all_ways(runtime, *sequences())


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_all_kinds_are_the_models_own(family: str, tmp_path: Path) -> None:
    runtime = checkpoints.runtime(checkpoints.write(family, tmp_path))
    runtime.warm_up()
    assert runtime.backends.names[0] == ProgramBackend.__name__
    eager, (seqs, nexts) = checkpoints.build(family), sequences()
    want = torch.stack([eager_logits(eager, [*ids, *some])[-8:] for ids, some in zip(seqs, nexts, strict=True)])
    for got in in_all_ways(runtime, seqs, nexts):
        assert_same(got, want)
    assert runtime.backends.num_base_steps == 0
    runtime.cache.check_integrity()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bits_of_a_row_depend_on_nothing_beside_it(family: str, tmp_path: Path) -> None:
    """Chains, trees, batches and chunks give the bits of single rows: without a tile, and for any number of threads."""
    path = checkpoints.write(family, tmp_path)
    settings: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
    runtime, by_three = checkpoints.runtime(path, **settings), checkpoints.runtime(path, **settings, num_threads=3)
    assert (runtime.warm_up().tile_rows, by_three.warm_up().tile_rows) == (1, 1)
    first, *others = [*steps_of(runtime), *steps_of(by_three)]
    for other in others:
        assert torch.equal(other, first)


def test_long_contexts_extend_the_tables_of_positions(tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path, max_position_embeddings=4096)
    runtime = checkpoints.runtime(path, kv_cache_tokens=4096, max_step_tokens=4096)
    runtime.warm_up()
    ids = tokens(random.Random(1), 1100)
    kv = runtime.cache.new_sequence()
    got = torch.cat([runtime.forward([StepRows(kv, ids[:1000])]), runtime.forward([StepRows(kv, ids[1000:])])])
    want = eager_logits(checkpoints.build("llama", max_position_embeddings=4096), ids)
    assert_same(got, want[[999, 1099]])


@pytest.mark.parametrize(("quantize", "allowed"), [("int8", 0.1), ("int4", 0.6)])
def test_quantized_weights_give_nearly_the_same_logits(quantize: str, allowed: float, tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path)
    whole, rounded = checkpoints.runtime(path), checkpoints.runtime(path, quantize=quantize)
    whole.warm_up()
    rounded.warm_up()
    assert rounded.backends.names[0] == ProgramBackend.__name__
    for got, want in zip(steps_of(rounded), steps_of(whole), strict=True):
        assert 0 < (got - want).norm() <= allowed * want.norm()


def test_what_no_program_expresses_runs_as_it_is_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runtime = checkpoints.runtime(checkpoints.write("mixtral", tmp_path))
    runtime.warm_up()
    assert ProgramBackend.__name__ not in runtime.backends.names
    assert "MixtralForCausalLM is run by its own code: " in caplog.text


def test_without_a_compiler_weights_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.runtime.program.recorder.record", lambda *_: 1 / 0)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path))
    runtime.warm_up()
    assert ProgramBackend.__name__ not in runtime.backends.names
    (seqs, nexts), eager = sequences(), checkpoints.build("llama")
    want = torch.stack([eager_logits(eager, [*ids, *some])[-8:] for ids, some in zip(seqs, nexts, strict=True)])
    assert_same(in_all_ways(runtime, seqs, nexts)[0], want)


@pytest.mark.parametrize("settings", [{"quantize": "int3"}, {"quantize": "int8", "device": "cuda"}])
def test_bad_quantization_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantize must be"):
        EngineConfig("m", **settings)
