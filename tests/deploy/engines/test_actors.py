"""The engine actors, in this process and in their own."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from core.config import EngineConfig
from core.errors import CheckpointError, WorkerLost
from core.records import (
    Base,
    DraftRequest,
    DraftUpdate,
    Findings,
    Missing,
    Sampling,
    SequenceSpec,
    Stamp,
    VerifyRequest,
)
from core.speculation.growth import NewNodes, TreeSpec
from deploy.engines import actors
from tests.deploy.fake_engines import FAIL, INFO, SLOW, FakeDraftActor, FakeDraftEngine, FakeTargetActor
from workers.runtime import this_machine

EPOCH = 5
SPEC = SequenceSpec(prompt_len=2, sampling=Sampling())


def verify_request(session: str = "a", last: int = 2) -> VerifyRequest:
    return VerifyRequest(Stamp(session, EPOCH, 1), Base(0, 0), (1, last), spec=SPEC)


@pytest.fixture
async def target():
    actor = FakeTargetActor(EngineConfig("fake"), EPOCH)
    info, findings = await actor.load()
    assert (info, findings.machine) == (INFO, this_machine())
    yield actor
    await actor._running.close()


async def test_replies_come_in_the_order_of_the_requests(target):
    replies = await target.verify([verify_request("a", 7), verify_request("b", 3)])
    assert [(reply.stamp.session, reply.next_token) for reply in replies] == [("a", 8), ("b", 4)]


async def test_released_sessions_are_gone_from_the_statistics(target):
    await target.verify([verify_request("a"), verify_request("b")])
    assert (await target.stats()).num_sessions == 2
    await target.release(["a", "unknown"])
    assert (await target.stats()).num_sessions == 1
    await target.check_integrity()


async def test_an_engine_says_that_it_works_between_two_steps_alone(target):
    await target.works()
    ended = []
    step = asyncio.create_task(target.verify([verify_request(last=SLOW)]))
    step.add_done_callback(lambda _: ended.append("step"))
    await asyncio.sleep(0.2)  # until it is in the step
    works = asyncio.create_task(target.works())
    works.add_done_callback(lambda _: ended.append("works"))
    await asyncio.gather(step, works)
    assert ended == ["step", "works"]


async def test_an_engine_that_failed_is_never_ready_again(target):
    with pytest.raises(WorkerLost, match="told to fail"):
        await target.verify([verify_request(last=FAIL)])
    with pytest.raises(WorkerLost, match="told to fail"):
        await target.ready()


async def test_what_is_known_of_the_place_reaches_the_engine():
    """The fake finds out nothing, and has learned nothing else than what it was given."""
    known = Findings("anywhere", is_compiled=True, tile_rows=4, step_times_s=((1, 0.5),))
    actor = FakeTargetActor(EngineConfig("fake"), EPOCH)
    assert (await actor.load(None, known))[1] is known
    await actor._running.close()


@pytest.mark.thorough
def test_a_replica_reads_what_its_engine_tells_without_torch():
    """Whose import takes each replica four seconds and 300 MB."""
    told = pickle.dumps((INFO, Findings("anywhere", is_compiled=True, tile_rows=4, step_times_s=((1, 0.5),))))
    code = f"import pickle, sys, deploy.app; pickle.loads({told!r}); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


async def test_torch_and_what_is_below_it_are_told_of_the_threads(monkeypatch):
    found = {}
    monkeypatch.setattr(ray, "remote", lambda **options: (found.update(options), Mock())[1])
    config = EngineConfig("fake", num_threads=3)
    actors.start(FakeTargetActor, config, EPOCH)
    variables = found["runtime_env"]["env_vars"]
    assert (variables["OMP_NUM_THREADS"], variables["MKL_NUM_THREADS"]) == ("3", "3")
    actor, before = FakeTargetActor(config, EPOCH), torch.get_num_threads()
    try:
        await actor.load()
        assert await asyncio.to_thread(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)
        await actor._running.close()


async def test_a_draft_actor_drafts():
    actor = FakeDraftActor(EngineConfig("fake"), EPOCH, 64)
    await actor.load()
    (drafted,) = await actor.draft([DraftRequest(Stamp("a", EPOCH, 1), Base(0, 0), (1, 2), TreeSpec.chain(2), SPEC)])
    assert drafted.new_nodes.tokens.tolist() == [3, 4]
    await actor._running.close()


GROW = DraftRequest(Stamp("a", EPOCH, 1), Base(0, 0), (1, 2), TreeSpec(1, 1), spec=SPEC)


async def test_a_draft_actor_says_what_grows_until_there_is_an_end(monkeypatch):
    said = [DraftUpdate(GROW.stamp, NewNodes(0), 2), DraftUpdate(GROW.stamp, NewNodes(3), 2), Missing(GROW.stamp, 0)]
    actor = FakeDraftActor(EngineConfig("fake"), EPOCH, 64)
    await actor.load()

    def step(engine):
        ((ticket, _),) = engine._waiting
        engine._waiting.clear()
        return [(ticket, each) for each in said]

    monkeypatch.setattr(FakeDraftEngine, "step", step)
    assert [each async for each in actor.grow(GROW)] == said
    await actor._running.close()


async def test_growth_on_a_draft_actor_that_fails_is_lost():
    actor = FakeDraftActor(EngineConfig("fake"), EPOCH, 64)
    await actor.load()
    with pytest.raises(WorkerLost, match="told to fail"):
        _ = [each async for each in actor.grow(replace(GROW, suffix=(1, FAIL)))]


@pytest.mark.ray
@pytest.mark.usefixtures("cluster_for_fakes")
async def test_a_broken_checkpoint_reaches_the_caller_by_name():
    actor = actors.start(FakeTargetActor, EngineConfig("broken"), EPOCH, num_cpus=1)
    with pytest.raises(CheckpointError, match=r"broken has no config\.json"):
        await actor.load.remote()
    ray.kill(actor)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster_for_fakes")
async def test_control_calls_do_not_wait_for_data_calls():
    actor = actors.start(FakeTargetActor, EngineConfig("fake"), EPOCH, num_cpus=1)
    await actor.load.remote()
    blocked = actor.block_data_calls.remote()
    await actor.ready.remote()
    assert (await actor.stats.remote()).num_sessions == 0
    await actor.unblock.remote()
    await blocked
    death = actor.until_death.remote()
    ray.kill(actor)
    with pytest.raises(RayActorError):
        await asyncio.wait_for(death, 30)


@pytest.mark.ray
@pytest.mark.ci
@pytest.mark.usefixtures("cluster_for_fakes")
async def test_an_engine_computes_with_as_many_threads_as_it_is_told():
    """A process with other threads is forked from another server, which has everything to import."""
    actor = actors.start(FakeTargetActor, EngineConfig("fake", num_threads=3), EPOCH, num_cpus=1)
    await actor.load.remote()
    assert await actor.num_threads.remote() == (3, "3")
    ray.kill(actor)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster_for_fakes")
async def test_an_engine_has_the_priority_of_the_process_that_began_the_cluster():
    """Ray would lower it once the engine is connected, and until then it would starve those that serve beside it."""
    actor = actors.start(FakeTargetActor, EngineConfig("fake"), EPOCH, num_cpus=1)
    assert await actor.niceness.remote() == os.getpriority(os.PRIO_PROCESS, os.getpid())
    ray.kill(actor)
