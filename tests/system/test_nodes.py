"""A cluster of several nodes, deployed to as Kubernetes does it: where the parts run, and that nodes may die."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.util.state import list_actors

from bench.disruption.cluster import settings
from bench.harness.load import Expected, SteadyLoad
from bench.harness.nodes import ROLE, ROLES, nodes, num_running, only_running, until
from bench.harness.traffic import PLAINLY, connected, request, run
from outrider_client import AsyncClient, Client

pytestmark = pytest.mark.ray

PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 64
ENGINES = {"TargetActor": "target", "DraftActor": "draft"}


@pytest.fixture(scope="module")
def up():
    with nodes() as up:
        up.deploy(settings())
        with Client(up.address) as client:
            client.wait_until_serving(60.0)
        yield up


@pytest.mark.ci
def test_each_part_runs_on_the_nodes_of_its_role(up):
    labels = {node["NodeID"]: node["Labels"].get(ROLE) for node in ray.nodes()}
    found = {(role_of(actor), labels[actor.node_id]) for actor in list_actors(up.dashboard, limit=1000) if lives(actor)}
    assert {(role, label) for role, label in found if role} == {(role, role) for role in ROLES}


def lives(actor: Any) -> bool:
    return bool(actor.state == "ALIVE")


def role_of(actor: Any) -> str:
    """The role of an engine, or of a replica, whose class Serve names after its deployment."""
    if actor.class_name in ENGINES:
        return ENGINES[actor.class_name]
    return actor.class_name.rpartition(":")[2] if actor.class_name.startswith("ServeReplica") else ""


@pytest.mark.ci
async def test_a_stream_across_nodes_is_that_of_plain_decoding(up):
    job = await expected(up, seed=1)
    async with connected(up.address) as stub:
        drafted = await run(stub, request(PROMPT, MAX_TOKENS, temperature=0.8, seed=1))
    assert drafted.tokens == job.tokens


async def expected(up: Any, seed: int) -> Expected:
    async with connected(up.address) as stub:
        plain = await run(stub, request(PROMPT, MAX_TOKENS, temperature=0.8, way=PLAINLY, seed=seed))
    return Expected(PROMPT, seed, 0.8, plain.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
async def test_streams_outlive_a_node_of_each_role(up, role):
    """The client resumes what an orchestrator takes with it; all else the service mends by itself."""
    counts = dict.fromkeys(ROLES, 1)
    jobs = [await expected(up, seed) for seed in range(4)]
    async with AsyncClient(up.address) as client, SteadyLoad(client, jobs) as load:
        load.keep(2)
        await asyncio.sleep(1.0)
        up.kill(role)
        up.add(role)
        await until(lambda: not only_running(counts))
        await until(lambda: only_running(counts), 120.0)
        await asyncio.sleep(1.0)
    assert load.tally.failures == []
    assert load.tally.num_wrong == 0
    assert load.tally.num_done >= 2


@pytest.mark.slow
async def test_an_update_of_both_models_breaks_no_stream_and_changes_no_token(up):
    jobs = [await expected(up, seed) for seed in range(4)]
    async with AsyncClient(up.address) as client, SteadyLoad(client, jobs) as load:
        load.keep(2)
        await asyncio.to_thread(up.deploy, settings(target={"num_cpus": 0.5}, draft={"num_cpus": 0.5}))
        await until(lambda: only_running(dict.fromkeys(ROLES, 1)), 120.0)
    assert load.tally.failures == []
    assert load.tally.num_wrong == load.tally.num_resumed == 0


@pytest.mark.slow
async def test_replicas_follow_the_load_and_drafts_go_down_to_none(up):
    scaling = {"upscale_delay_s": 1, "downscale_delay_s": 5, "window_s": 11}
    scaled = settings(
        target={"autoscaling": {"max_replicas": 2, "sessions": 2, **scaling}},
        draft={"autoscaling": {"min_replicas": 0, "max_replicas": 1, **scaling}},
    )
    jobs = [await expected(up, seed) for seed in range(4)]
    await asyncio.to_thread(up.deploy, scaled)
    await until(lambda: num_running("draft") == 0, 120.0)
    async with AsyncClient(up.address) as client, SteadyLoad(client, jobs) as load:
        load.keep(4)
        await until(lambda: num_running("draft") == 1 and num_running("target") == 2, 120.0)
    await until(lambda: only_running({"orchestrator": 1, "target": 1, "draft": 0}), 180.0)
    assert load.tally.failures == []
    assert load.tally.num_wrong == load.tally.num_resumed == 0
