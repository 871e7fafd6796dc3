"""Stages of ranks write what one process writes, and end together when a rank of any stage is lost."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.errors import StartupError, UnsupportedModel, WorkerLost
from core.records import Adapter, Sampling
from tests import checkpoints
from tests.adapters import merge, write_adapter
from tests.workers.engine.driving import EPOCH, Driver
from tests.workers.engine.test_engine_adapters import add, alone, driver
from tests.workers.engine.test_target import random_tree
from tests.workers.parallel.ranks import TIMEOUT_S, Followers, config_of, followed, ranks
from tests.workers.parallel.test_parallel import assert_equal_to_one_rank, write
from workers.engine.target import TargetEngine
from workers.model import LoadedModel, loader
from workers.parallel import Rank, group
from workers.runtime import memory
from workers.runtime.backends import packed_cpu

pytestmark = pytest.mark.thorough

PROMPT = [5, 17, 99, 4, 200, 31]
NOTICE_S = TIMEOUT_S / 2
NOT_CALLED = "model.layers.1.mlp.down_proj"
SHAPES = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


@pytest.fixture(scope="module")
def three_followers() -> Iterator[Followers]:
    with Followers(3) as followers:
        yield followers


@pytest.mark.parametrize("shape", SHAPES)
def test_two_stages_of_two_ranks_compute_what_one_process_does(
    three_followers: Followers, shape: str, tmp_path: Path
) -> None:
    family, overrides = SHAPES[shape]
    path = write(family, tmp_path, **overrides)
    assert_equal_to_one_rank(three_followers, path, tensor_parallel=2, pipeline_parallel=2)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)])
def test_trees_of_guesses_leave_plain_decoding(followers: Followers, sampling: Sampling, tmp_path: Path) -> None:
    """One process a stage, with roll-backs and compactions after each verdict."""
    path = checkpoints.write("gpt2", tmp_path)  # which has no plan for tensor parallelism
    plain = TargetEngine.load(config_of(path), EPOCH, lambda _: None)
    expected, random, num_accepted = Driver(plain, PROMPT, sampling).run(30), Random(1), 0
    with followers.engine(path, EPOCH, tensor_parallel=1, pipeline_parallel=2, block_tokens=4) as engine:
        engine.warm_up(lambda _: None)
        session = Driver(engine, PROMPT, sampling)
        session.verify()
        while len(session.log) < len(PROMPT) + 26:
            done = len(session.log) - len(PROMPT)
            num_accepted += len(session.verify(random_tree(random, expected[done : done + 4])).path)
            got = list(session.log.tokens)[len(PROMPT) :]
            assert got == expected[: len(got)]
        assert num_accepted > 8


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_death_of_a_rank_of_any_stage_ends_all(lost: int, tmp_path: Path) -> None:
    """Ranks 1, 2 and 3: one beside rank 0, and the two of the second stage."""
    path, noticed, reasons = checkpoints.write("llama", tmp_path), threading.Event(), list[str]()

    def on_loss(reason: str) -> None:
        reasons.append(reason)
        noticed.set()

    config = config_of(path, 2, pipeline_parallel=2)
    group = ranks(config.num_ranks)
    with ExitStack() as after:
        followers = after.enter_context(Followers(3))
        followers.start(config, group)
        engine = TargetEngine.load(config, EPOCH, lambda _: None, group[0], on_loss)
        try:
            session = Driver(engine, PROMPT)
            session.verify()
            os.kill(followers.pid(lost), signal.SIGKILL)
            assert noticed.wait(NOTICE_S)
            assert reasons == [f"rank {lost + 1} is gone"]
            engine.add(session.verify_request())
            with pytest.raises(WorkerLost, match=f"rank {lost + 1} is gone"):
                engine.step()
            outcomes = followers.outcomes(NOTICE_S)
            assert outcomes.pop(lost) == "dead"
            assert all(outcome.startswith("WorkerLost: ") for outcome in outcomes)
        finally:
            with suppress(WorkerLost):
                engine.close()


def test_stages_of_different_checkpoints_do_not_start(followers: Followers, tmp_path: Path) -> None:
    """Stages have no weights in common that could differ."""
    paths = [checkpoints.write("llama", tmp_path / str(number)) for number in range(2)]
    weights = load_file(paths[1] / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, paths[1] / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = {"size": 1, "pipeline_parallel": 2}
    group = ranks(2)
    followers.start(config_of(paths[1], **settings), group)
    with pytest.raises(StartupError, match="rank 1 has other settings or another checkpoint than rank 0"):
        TargetEngine.load(config_of(paths[0], **settings), EPOCH, lambda _: None, group[0])
    assert "StartupError" in followers.outcomes()[0]


def test_an_adapter_is_read_by_the_stage_that_has_its_layers(followers: Followers, tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path / "llama")
    adapter = write_adapter(tmp_path / "a", path, 2, ("o_proj", "lm_head", "k_proj"))
    merged = merge(tmp_path / "merged", path, adapter)
    with followers.engine(path, EPOCH, tensor_parallel=1, pipeline_parallel=2) as engine:
        assert driver(engine, add(engine, adapter)).run(8) == alone(merged, 8)


def _multiplies_by_weights_itself(config: EngineConfig, rank: Rank) -> str:
    """Follow with a model that multiplies by the weights of the module `NOT_CALLED` without calling it."""
    load = loader.load

    def load_and_bypass(*args: Any) -> LoadedModel:
        loaded = load(*args)
        module = loaded.model.get_submodule(NOT_CALLED)
        module._call_impl = module.forward  # hooks are called there
        return loaded

    with patch.object(loader, "load", load_and_bypass):
        return followed(config, rank)


def test_an_adapter_on_a_module_that_a_later_stage_does_not_call_is_refused(
    followers: Followers, tmp_path: Path
) -> None:
    path = checkpoints.write("llama", tmp_path / "llama")
    adapter = Adapter("a", str(write_adapter(tmp_path / "a", path)))
    settings = {"tensor_parallel": 1, "pipeline_parallel": 2}
    with followers.runtime(path, role=_multiplies_by_weights_itself, **settings) as runtime:
        with pytest.raises(UnsupportedModel, match=f"adapter 'a': the model does not call {re.escape(NOT_CALLED)}"):
            runtime.add_adapter(1, runtime.read_adapter(adapter))
        others = ("q_proj", "o_proj")
        runtime.add_adapter(1, runtime.read_adapter(Adapter("b", str(write_adapter(tmp_path / "b", path, 1, others)))))


def _on_another_machine(config: EngineConfig, rank: Rank) -> str:
    with patch.object(group, "this_machine", lambda: "another machine"):
        return followed(config, rank)


@pytest.mark.parametrize(("role", "num_local"), [(followed, 2), (_on_another_machine, 1)])
def test_the_ranks_of_a_machine_share_its_memory(
    role: Callable[[EngineConfig, Rank], str],
    num_local: int,
    followers: Followers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For KV, and for weights that are laid out again."""
    divided_by = []

    def free_bytes(_device: object, num_ranks: int) -> int:
        divided_by.append(num_ranks)
        return 1 << 28

    for module in (memory, packed_cpu):
        monkeypatch.setattr(module, "free_bytes", free_bytes)
    settings = {"tensor_parallel": 1, "pipeline_parallel": 2, "kv_cache_tokens": None, "kv_memory_share": 0.001}
    with followers.runtime(checkpoints.write("llama", tmp_path), role, **settings):
        assert divided_by == [num_local] * 2
