"""Ranks of one machine run programs of native code, exchange rows in shared memory, and wait for nobody who died."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest

from core.config import EngineConfig
from core.errors import WorkerLost
from core.speculation import TokenTree
from tests import checkpoints
from tests.workers.engine.driving import EPOCH, Driver
from tests.workers.parallel.ranks import Followers, config_of, followed, ranks
from tests.workers.parallel.test_parallel import (
    SHAPES,
    THREE,
    all_kinds_of_steps,
    assert_company_changes_no_bits,
    write,
)
from tests.workers.parallel.test_parallel_group import NOTICE_S, PROMPT, led, quiet
from tests.workers.runtime.test_runtime import assert_same
from workers.engine.target import TargetEngine
from workers.parallel import Rank, leader, shared_memory
from workers.runtime.backends import PackedBackend, ProgramBackend
from workers.runtime.runtime import ModelRuntime
from workers.step import StepRows

pytestmark = pytest.mark.thorough


@contextmanager
def warmed(followers: Followers, path: Path, *role: Any, **settings: Any) -> Iterator[ModelRuntime]:
    with followers.runtime(path, *role, **settings) as runtime:
        runtime.warm_up(quiet)
        assert runtime.backends.names[0] == ProgramBackend.__name__
        yield runtime


def with_two_threads(config: EngineConfig, rank: Rank) -> str:
    return followed(replace(config, num_threads=2), rank)


def assert_equal_steps(shared: ModelRuntime, path: Path) -> None:
    for got, want in zip(all_kinds_of_steps(shared), all_kinds_of_steps(checkpoints.runtime(path)), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("shape", SHAPES)
def test_programs_of_two_ranks_compute_what_one_process_does(followers: Followers, shape: str, tmp_path: Path) -> None:
    family, overrides = SHAPES[shape]
    path = write(family, tmp_path, **overrides)
    with warmed(followers, path) as shared:
        assert_equal_steps(shared, path)
        assert shared.backends.num_base_steps == 0


def test_three_ranks_have_as_many_threads_as_they_like(tmp_path: Path) -> None:
    path = write("qwen3", tmp_path, **THREE)
    with Followers(2) as two_followers, warmed(two_followers, path, with_two_threads) as shared:
        assert_equal_steps(shared, path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_company(followers: Followers, dtype: str, tmp_path: Path) -> None:
    with warmed(followers, checkpoints.write("llama", tmp_path), deterministic=True, dtype=dtype) as shared:
        assert_company_changes_no_bits(shared)


def test_features_are_those_of_one_process(followers: Followers, tmp_path: Path) -> None:
    path, layers = checkpoints.write("llama", tmp_path), (-1, 1)

    def features(runtime: ModelRuntime) -> Any:
        return runtime.scores([StepRows(runtime.cache.new_sequence(), [1, 2, 3], TokenTree.chain([4, 5]))]).features

    with warmed(followers, path, feature_layers=layers) as shared:
        assert_same(features(shared), features(checkpoints.runtime(path, feature_layers=layers)))


def test_without_shared_memory_ranks_run_the_models_own_code(
    followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on several machines share no memory: commands and sums go through gloo."""
    path = write("llama", tmp_path)
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "nowhere")
    with followers.runtime(path) as shared:
        shared.warm_up(quiet)
        assert shared.backends.names == (PackedBackend.__name__,)
        assert_equal_steps(shared, path)


def without_a_compiler(config: EngineConfig, rank: Rank) -> str:
    with patch("workers.runtime.program.recorder.record", side_effect=OSError("no compiler")):
        return followed(config, rank)


@pytest.mark.parametrize("who", ["rank 0", "a follower"])
def test_what_one_rank_cannot_prepare_all_do_without(
    followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Its sums by gloo would wait for those of the others' programs for ever."""
    path = write("llama", tmp_path)
    if who == "rank 0":
        monkeypatch.setattr("workers.runtime.program.recorder.record", lambda *_: 1 / 0)
    with followers.runtime(path, without_a_compiler if who == "a follower" else None) as shared:
        shared.warm_up(quiet)
        assert shared.backends.names == (PackedBackend.__name__,)
        assert_equal_steps(shared, path)


# Death, in the middle of a program


@contextmanager
def stopped(path: Path, timeout_s: float = 60.0) -> Iterator[tuple[Any, Driver, int]]:
    """An engine whose follower has been stopped, so that a step begins and waits for it; and the follower's process."""
    with led(1, config_of(path, 2), timeout_s=timeout_s) as (engine, followers):
        engine.warm_up(quiet)
        assert engine._runtime.backends.names[0] == ProgramBackend.__name__
        driver = Driver(engine, PROMPT)
        driver.verify()
        os.kill(followers.pid(0), signal.SIGSTOP)
        engine.add(driver.verify_request())
        yield engine, driver, followers.pid(0)


def test_a_program_does_not_wait_for_a_rank_that_died(tmp_path: Path) -> None:
    with stopped(checkpoints.write("llama", tmp_path)) as (engine, _, pid):
        timer = threading.Timer(0.7, os.kill, [pid, signal.SIGKILL])
        began_s = monotonic()
        timer.start()
        with pytest.raises(WorkerLost, match="rank 1 is gone"):
            engine.step()
        assert 0.6 < monotonic() - began_s < NOTICE_S
        timer.join()


def breaks(config: EngineConfig, rank: Rank) -> str:
    failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    with patch.object(leader, "_run", side_effect=failure):
        return followed(config, rank)


def test_a_device_that_fails_ends_the_group_at_once(tmp_path: Path) -> None:
    config, group = config_of(checkpoints.write("llama", tmp_path), 2), ranks(2)
    with Followers(1) as followers:
        followers.start(config, group, breaks)
        engine = TargetEngine.load(config, EPOCH, quiet, group[0])
        began_s = monotonic()
        try:
            with pytest.raises(WorkerLost):
                engine.warm_up(quiet)
            assert followers.outcomes(NOTICE_S) == ["dead"]
            assert monotonic() - began_s < NOTICE_S
        finally:
            with suppress(WorkerLost):
                engine.close()


def test_a_program_gives_up_a_rank_that_hangs(tmp_path: Path) -> None:
    with stopped(checkpoints.write("llama", tmp_path), timeout_s=3.0) as (engine, _, _pid):
        began_s = monotonic()
        with pytest.raises(WorkerLost, match="not complete a step within 3 s"):
            engine.step()
        assert 2.0 < monotonic() - began_s < NOTICE_S
