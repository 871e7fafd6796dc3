"""The engine actors, in this process and in their own."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from unittest.mock import Mock

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, WorkerLost
from core.records import (
    Base,
    DraftRequest,
    Findings,
    Sampling,
    SequenceSpec,
    Stamp,
    VerifyRequest,
)
from core.speculation.growth import TreeSpec
from deploy.engines import actors
from deploy.link.client import Link
from tests.deploy.fake_engines import FAIL, INFO, FakeDraftActor, FakeTargetActor
from tests.exchange import replies_of
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
    await closed(actor)


async def closed(actor):
    actor._links.close()
    await actor._running.close()


async def test_replies_come_in_the_order_of_the_requests(target):
    replies = await replies_of(target._running, [verify_request("a", 7), verify_request("b", 3)])
    assert [(reply.stamp.lease, reply.next_token) for reply in replies] == [("a", 8), ("b", 4)]


async def test_released_sessions_are_gone_from_the_statistics(target):
    await replies_of(target._running, [verify_request("a"), verify_request("b")])
    assert (await target.stats()).num_sessions == 2
    await target.release(["a", "unknown"])
    assert (await target.stats()).num_sessions == 1
    await target.check_integrity()


async def test_an_engine_that_failed_is_never_ready_again(target):
    with pytest.raises(WorkerLost, match="told to fail"):
        await replies_of(target._running, [verify_request(last=FAIL)])
    with pytest.raises(WorkerLost, match="told to fail"):
        await target.ready()


async def test_the_owner_of_an_engine_that_failed_learns_of_it_at_once(target):
    watch = asyncio.create_task(target.until_death())
    with pytest.raises(WorkerLost, match="told to fail"):
        await replies_of(target._running, [verify_request(last=FAIL)])
    with pytest.raises(WorkerLost, match="told to fail"):
        await asyncio.wait_for(watch, 5)


async def test_what_is_known_of_the_place_reaches_the_engine():
    """The fake finds out nothing, and has learned nothing else than what it was given."""
    known = Findings("anywhere", is_compiled=True, tile_rows=4, step_times_s=((1, 0.5),))
    actor = FakeTargetActor(EngineConfig("fake"), EPOCH)
    assert (await actor.load(None, known))[1] is known
    await closed(actor)


@pytest.mark.thorough
def test_a_replica_reads_what_its_engine_tells_without_torch():
    """Importing torch takes each replica four seconds and 300 MB."""
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
        await closed(actor)


async def test_a_draft_actor_drafts():
    actor = FakeDraftActor(EngineConfig("fake"), EPOCH, 64)
    await actor.load()
    (drafted,) = await replies_of(
        actor._running, [DraftRequest(Stamp("a", EPOCH, 1), Base(0, 0), (1, 2), TreeSpec.chain(2), SPEC)]
    )
    assert drafted.new_nodes.tokens.tolist() == [3, 4]
    await closed(actor)


async def test_an_engine_without_a_free_port_ends_its_start_before_it_loads(target):
    port = target._links._listener.getsockname()[1]
    actor = FakeTargetActor(EngineConfig("broken", link_ports=(port, port)), EPOCH)
    with pytest.raises(StartupError, match=rf"ports {port} to {port} of .* are all in use; engine\.link_ports sets"):
        await actor.load()


async def test_requests_over_an_actors_link_are_answered(target):
    link = await Link.open(await target.open_links())
    (reply,) = await replies_of(link, [verify_request("a", 7)])
    assert reply.next_token == 8
    link.close("the test is over")


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
