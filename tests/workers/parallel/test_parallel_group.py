"""A group of ranks starts as a whole or not at all, ends as a whole, and never leaves anybody waiting."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

import pytest

from core.config import EngineConfig
from core.errors import ConfigError, StartupError, UnsupportedModel, WorkerLost
from tests import checkpoints
from tests.workers.engine.driving import EPOCH, Driver
from tests.workers.parallel.ranks import ADDRESS, TIMEOUT_S, Followers, config_of, free_port, is_alive, ranks
from workers.engine.target import TargetEngine
from workers.model import loader
from workers.parallel import Rank
from workers.parallel.leader import load_runtime, run_follower
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough

PROMPT = [5, 17, 99, 4, 200, 31]
NOTICE_S = TIMEOUT_S / 2
"""Who notices sooner has not waited for the limit."""


def quiet(_: str) -> None: ...


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


@contextmanager
def led(num_followers, config, on_loss=quiet, timeout_s=TIMEOUT_S):
    """An engine and those that follow it, of whom nothing is left after it."""
    group = ranks(config.tensor_parallel, timeout_s)
    with ExitStack() as after:
        followers = after.enter_context(Followers(num_followers))
        followers.start(config, group)
        engine = TargetEngine.load(config, EPOCH, quiet, group[0], on_loss)
        try:
            yield engine, followers
        finally:
            after.close()  # what waits for one that is stopped ends when it is dead
            with suppress(WorkerLost):
                engine.close()


# Start


REFUSED = [
    (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
        2,
        "llama has 3 heads, no multiple",
    ),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 2, "k_proj has 3 heads"),
    ("llama", {"intermediate_size": 65}, 2, "mlp.gate_proj has 65 features"),
    (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "intermediate_size": 66},
        3,
        "2 h",
    ),
    ("gpt2", {}, 2, "no tensor-parallel plan"),
    ("qwen3_moe", {"moe_intermediate_size": 33}, 2, "gate_up_proj has 33 features.* set expert_parallel to true"),
]
REFUSED_BY_EXPERT = [
    ("qwen3_moe", {"num_experts": 5}, "gate_up_proj has 5 experts.* set expert_parallel to false"),
    ("llama", {}, "llama has no experts that can be split: set expert_parallel to false"),
]


@pytest.mark.parametrize(("family", "overrides", "size", "reason"), REFUSED)
def test_what_cannot_be_shared_is_refused_before_its_weights_are_read(family, overrides, size, reason, tmp_path):
    path = checkpoints.write(family, tmp_path, **overrides)
    (path / "model.safetensors").write_bytes(b"nobody reads this")
    with pytest.raises(UnsupportedModel, match=reason):
        loader.check_checkpoint(config_of(path, size))


@pytest.mark.parametrize(("family", "overrides", "reason"), REFUSED_BY_EXPERT)
def test_experts_that_cannot_be_shared_are_refused(family, overrides, reason, tmp_path):
    path = checkpoints.write(family, tmp_path, **overrides)
    with pytest.raises(UnsupportedModel, match=reason):
        loader.check_checkpoint(config_of(path, 2, expert_parallel=True))


def test_what_is_not_asked_for_is_refused(checkpoint):
    two = ranks(2)
    with pytest.raises(ConfigError, match="tensor_parallel is 1, but there are 2 ranks"):
        run_follower(config_of(checkpoint), two[1], quiet)
    with pytest.raises(ConfigError, match="tensor_parallel is 2, but this engine runs on its own"):
        load_runtime(config_of(checkpoint, 2), quiet)
    with pytest.raises(ConfigError, match="the engine is rank 0"):
        load_runtime(config_of(checkpoint, 2), quiet, two[1])
    with pytest.raises(ConfigError, match="rank 2 is not below the number of ranks, 2"):
        Rank(2, 2, ADDRESS, free_port())
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1"):
        EngineConfig("m", tensor_parallel=0)


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_limit(checkpoint):
    began_s = monotonic()
    with pytest.raises(StartupError, match="rank 0 of 2 did not meet the others"):
        load_runtime(config_of(checkpoint, 2), quiet, ranks(2, timeout_s=1.0)[0])
    assert monotonic() - began_s < 4


def test_a_problem_of_one_rank_is_told_by_all(followers, checkpoint, tmp_path):
    group = ranks(2)
    followers.start(config_of(tmp_path / "nowhere", 2), group)
    with pytest.raises(StartupError, match=r"rank 1: .*nowhere is not a directory"):
        load_runtime(config_of(checkpoint, 2), quiet, group[0])
    assert followers.outcomes() == [f"CheckpointError: {tmp_path / 'nowhere'} is not a directory"]


@pytest.mark.parametrize("change", ["weights", "settings"])
def test_ranks_of_different_models_do_not_start(followers, checkpoint, tmp_path, change):
    other = checkpoints.write("llama", tmp_path / "other", seed=1) if change == "weights" else checkpoint
    theirs = config_of(other, 2, kv_cache_tokens=4096 if change == "weights" else 2048)
    if change == "weights":
        raise_norms(other)
    group = ranks(2)
    followers.start(theirs, group)
    with pytest.raises(StartupError, match="rank 1 has other settings or another checkpoint"):
        load_runtime(config_of(checkpoint, 2), quiet, group[0])
    assert "StartupError" in followers.outcomes()[0]


def raise_norms(path):
    """Trained models differ in their norms; random ones have all ones."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_group_can_follow_another_in_the_same_processes(followers, checkpoint):
    for _ in range(2):
        with followers.runtime(checkpoint) as runtime:
            kv = runtime.cache.new_sequence()
            assert runtime.forward([StepRows(kv, PROMPT)]).shape == (1, checkpoints.VOCAB_SIZE)


# Death


def test_the_death_of_a_follower_is_noticed_while_the_engine_is_idle(checkpoint):
    noticed, reasons = threading.Event(), []

    def on_loss(reason):
        reasons.append(reason)
        noticed.set()

    with led(1, config_of(checkpoint, 2), on_loss) as (engine, followers):
        driver = Driver(engine, PROMPT)
        driver.verify()
        os.kill(followers.pid(0), signal.SIGKILL)
        assert noticed.wait(NOTICE_S)
        assert reasons == ["rank 1 is gone"]
        engine.add(driver.verify_request())
        with pytest.raises(WorkerLost, match="rank 1 is gone"):
            engine.step()


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), ("glm4_moe", {}), ("glm4_moe", {"expert_parallel": True})]
)
def test_the_death_of_a_follower_ends_a_step_that_waits_for_it(family, settings, tmp_path):
    """It is stopped, so that the step begins, and killed while rank 0 waits for its part of a sum."""
    with led(1, config_of(checkpoints.write(family, tmp_path), 2, **settings)) as (engine, followers):
        driver = Driver(engine, PROMPT)
        driver.verify()
        os.kill(followers.pid(0), signal.SIGSTOP)
        killed_s = []

        def kill():
            killed_s.append(monotonic())
            os.kill(followers.pid(0), signal.SIGKILL)

        timer = threading.Timer(0.7, kill)
        timer.start()
        engine.add(driver.verify_request())
        with pytest.raises(WorkerLost):
            engine.step()
        assert killed_s, "it was waited for"
        assert monotonic() - killed_s[0] < NOTICE_S
        timer.join()


def test_a_follower_that_hangs_is_given_up_after_the_limit(checkpoint):
    with led(1, config_of(checkpoint, 2), timeout_s=3.0) as (engine, followers):
        driver = Driver(engine, PROMPT)
        driver.verify()
        os.kill(followers.pid(0), signal.SIGSTOP)
        engine.add(driver.verify_request())
        began_s = monotonic()
        with pytest.raises(
            WorkerLost, match=r"not done its part within 3 s|not complete a step within 3 s|lost each other"
        ):
            engine.step()
        assert 2.5 < monotonic() - began_s < TIMEOUT_S


def test_one_dead_follower_of_two_ends_the_other(tmp_path):
    path = checkpoints.write(
        "llama", tmp_path, num_attention_heads=6, num_key_value_heads=1, hidden_size=48, intermediate_size=66
    )
    with led(2, config_of(path, 3)) as (engine, followers):
        Driver(engine, PROMPT).verify()
        os.kill(followers.pid(0), signal.SIGKILL)
        dead, other = followers.outcomes(NOTICE_S)
        assert dead == "dead"
        assert other.startswith("WorkerLost: ")


def test_followers_end_when_rank_0_dies_and_no_process_is_left(checkpoint):
    """Rank 0 is a process of its own here, which is killed while all of them are idle."""
    with Followers(1) as rest, Followers(1) as first:
        config, group = config_of(checkpoint, 2), ranks(2)
        rest.start(config, group)
        first.lead(config, group[0])
        assert first.outcomes() == ["leading"]
        os.kill(first.pid(0), signal.SIGKILL)
        outcome = rest.outcomes(NOTICE_S)
        assert outcome[0].startswith("WorkerLost: ")
        rest.leave()
        rest.processes[0].join(NOTICE_S)
        assert not is_alive(rest.pid(0))


def test_a_failure_on_rank_0_ends_the_followers(checkpoint, monkeypatch):
    """It has sent the command, and fails in the middle of its own part: they would wait for its sum for ever."""
    with led(1, config_of(checkpoint, 2)) as (engine, followers):
        layer = engine._runtime.context.model.model.layers[1]

        def fail(*_args, **_kwargs):
            raise MemoryError("no room")

        monkeypatch.setattr(layer, "forward", fail)
        driver = Driver(engine, PROMPT)
        engine.add(driver.verify_request())
        with pytest.raises(MemoryError):
            engine.step()
        assert followers.outcomes(NOTICE_S)[0].startswith("WorkerLost: ")
