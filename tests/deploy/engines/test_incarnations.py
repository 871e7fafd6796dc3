"""Messages about an engine's death."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest
from ray.exceptions import RayError, RayTaskError

from core.config import EngineConfig
from core.errors import WorkerLost
from deploy.engines import actors, incarnations
from deploy.engines.actors import FollowerActor, TargetActor
from deploy.engines.incarnations import Incarnation, cause_of_death

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: TargetActor
\tactor_id: 7d1e2e9f12daf13cce465a4701000000
The actor is dead because """
ADVICE = (
    "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RayError(DIED + ADVICE), "its process was killed or crashed"),
        (RayError(DIED + "it was killed by `ray.kill`."), "it was killed by `ray.kill`"),
        (RayError(DIED + "its node has died. Node Id: 0123"), "its node has died"),
        (RayError("The actor is unavailable.\nTry again."), "The actor is unavailable."),
        (RayTaskError("verify", "Traceback\nover\nmany lines", WorkerLost("out of memory\nat 0x7f")), "out of memory"),
        (WorkerLost("told to fail"), "told to fail"),
    ],
)
def test_the_cause_is_a_few_words_without_traces_and_advice(error, cause):
    assert cause_of_death(error) == cause


async def test_all_ranks_of_a_model_live_and_die_together(monkeypatch):
    started, killed = [], []

    def start(actor, config, number, *arguments, **placement):
        started.append((actor, placement["rank"]))
        return len(started) - 1

    monkeypatch.setattr(actors, "start", start)
    monkeypatch.setattr(incarnations.ray, "kill", killed.append)
    config = EngineConfig("m", tensor_parallel=3)
    incarnation = Incarnation("target", TargetActor, config, lambda rank: {"rank": rank})
    assert started == [(TargetActor, 0), (FollowerActor, 1), (FollowerActor, 2)]
    incarnation.kill()
    assert sorted(killed) == [0, 1, 2]


WITHOUT_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize("who", ["rank 0", "a follower"])
async def test_ranks_that_ran_out_of_memory_are_followed_by_ranks_with_smaller_steps(monkeypatch, who):
    """Or the same step would end these, too."""
    monkeypatch.setattr(actors, "start", lambda *_, **__: None)
    config = EngineConfig("m", tensor_parallel=2, max_step_tokens=512, kv_memory_share=0.8)
    incarnation = Incarnation("target", TargetActor, config, lambda _: {})
    assert await incarnation.config_of_next() == config
    if who == "rank 0":
        incarnation.fail(f"the engine failed: {WITHOUT_MEMORY}")
    else:
        end = Future()
        incarnation._follower_ends.append(end)
        threading.Timer(0.05, end.set_exception, [RuntimeError(f"a trace\n{WITHOUT_MEMORY}")]).start()
        end.add_done_callback(partial(incarnation._note_end, 1))
        incarnation.fail("its process was killed or crashed")
    smaller = await incarnation.config_of_next()
    assert (smaller.max_step_tokens, smaller.kv_memory_share) == (256, pytest.approx(0.76))


async def test_a_death_for_another_reason_changes_no_setting(monkeypatch):
    monkeypatch.setattr(actors, "start", lambda *_, **__: None)
    config = EngineConfig("m", tensor_parallel=2)
    incarnation = Incarnation("target", TargetActor, config, lambda _: {})
    incarnation.fail("CUDA error: an illegal memory access was encountered")
    assert await incarnation.config_of_next() == config
    alone = Incarnation("target", TargetActor, EngineConfig("m"), lambda _: {})
    alone.fail(WITHOUT_MEMORY)
    assert await alone.config_of_next() == EngineConfig("m"), "it makes smaller steps by itself"
