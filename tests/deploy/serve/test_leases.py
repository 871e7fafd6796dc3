"""Leases and ports on a real cluster, with fake engines: what is taken is given back, and what dies is replaced."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray import serve
from ray.util import list_named_actors

from core.config import DraftConfig, EngineConfig, Limits, TargetConfig
from core.errors import Unavailable, WorkerLost
from core.records import Base, DraftRequest, Sampling, SequenceSpec, Stamp, VerifyRequest
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import TokenTree
from deploy.app import worker
from deploy.serve.affinity import prefix_hashes
from deploy.serve.deployments import DraftWorker, TargetWorker
from deploy.serve.draining import replicas_now
from deploy.serve.leases import ServeLease, ServeLeases
from deploy.serve.routing import PrefixAwareRouter, draft_router, target_router
from tests.deploy.fake_engines import FAIL, INFO, SLOW, SLOW_LOAD_S, STUCK, FakeDraftActor, FakeTargetActor, Front
from tests.exchange import replies_of

pytestmark = pytest.mark.ray

APPLICATION = "leases"
TARGET = TargetConfig(EngineConfig("fake"), max_sessions=60)
DRAFT = DraftConfig(EngineConfig("fake"), max_sessions=2)
TWO_SLOW_TO_LOAD = TargetConfig(EngineConfig("slow"), num_replicas=2)
SPEC = SequenceSpec(prompt_len=2, sampling=Sampling())


@pytest.fixture(scope="module", autouse=True)
def application(cluster_for_fakes, trap):
    deploy(replace(TARGET, engine=EngineConfig(str(trap))), DRAFT)
    yield
    serve.delete(APPLICATION)


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """Where a file makes targets die while they load."""
    return tmp_path_factory.mktemp("trap") / "model"


deployed: list[TargetConfig] = []


def deploy(target: TargetConfig, draft: DraftConfig) -> None:
    """Deploy, or update what is deployed: all replicas start anew. Nothing if this target is deployed already."""
    if target in deployed[-1:]:
        return
    deployed.append(target)
    targets = worker(TargetWorker, target).options(request_router_config=target_router())
    targets = targets.bind(target, "pair", FakeTargetActor)
    drafts = worker(DraftWorker, draft).options(request_router_config=draft_router())
    drafts = drafts.bind(draft, "pair", 64, FakeDraftActor)
    serve.run(serve.deployment(Front).bind(targets, drafts), name=APPLICATION)


@pytest.fixture
async def new_leases():
    """Makes leases with limits of their own; their links are closed when the test is over."""
    made: list[ServeLeases] = []

    def make(**limits: Any) -> ServeLeases:
        target, draft = (serve.get_deployment_handle(name, APPLICATION) for name in ("target", "draft"))
        made.append(ServeLeases(target, [(draft, None)], Limits(**limits)))
        return made[-1]

    yield make
    for deployment in [each for leases in made for each in (leases._target, *leases._drafts)]:
        for link in deployment.links._links.values():
            link.close("the test is over")
    await asyncio.sleep(0.05)


@pytest.fixture
async def leases(new_leases):
    return new_leases(lease_timeout_s=120.0)  # a busy machine takes a while to replace an engine


def verify_request(lease: ServeLease[Any], last: int = 2, block: TokenTree | None = None) -> VerifyRequest:
    return VerifyRequest(Stamp(lease.name, lease.epoch, 1), Base(0, 0), (1, last), block or TokenTree(), SPEC)


async def engine_of(leases: ServeLeases) -> Any:
    """The engine actor behind the leases; nothing but a test looks at it."""
    lease = await leases.take_target("to look")
    lease.release()
    return lease.port._engine


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that other processes do; the test's own timeout ends a wait in vain."""
    while not await condition():  # noqa: ASYNC110  the event happens in another process
        await asyncio.sleep(0.02)


async def test_a_leased_target_verifies_and_is_free_after_release(leases):
    lease = await leases.take_target("a")
    (verdict,) = await replies_of(lease.port, [verify_request(lease, block=TokenTree.chain([3, 4, 9]))])
    assert (verdict.path, verdict.next_token) == ((0, 1), 5)
    engine = await engine_of(leases)
    assert (await engine.stats.remote()).num_sessions == 1
    lease.release()
    lease.release()
    await until(lambda: has_no_sessions(engine))


async def has_no_sessions(engine: Any) -> bool:
    return (await engine.stats.remote()).num_sessions == 0


async def test_a_leased_draft_guesses(leases):
    lease = await leases.take_draft("a")
    request = DraftRequest(Stamp(lease.name, lease.epoch, 1), Base(0, 0), (1, 2), TreeSpec.chain(3), SPEC)
    (drafted,) = await replies_of(lease.port, [request])
    assert drafted.new_nodes.tokens.tolist() == [3, 4, 5]
    lease.release()


async def test_leases_of_one_engine_share_its_port(leases):
    first, second = await asyncio.gather(leases.take_target("a"), leases.take_target("b"))
    assert first.engine_id == second.engine_id
    assert first.port is second.port
    replies = await replies_of(first.port, [verify_request(first, 5), verify_request(second, 7)])
    assert [(reply.stamp.lease, reply.next_token) for reply in replies] == [(first.name, 6), (second.name, 8)]
    first.release()
    second.release()


async def test_requests_go_over_one_link_to_each_engine(leases):
    first, second, draft = [await take("a") for take in (leases.take_target, leases.take_target, leases.take_draft)]
    assert first.port._link is second.port._link is not None
    assert draft.port._link is not first.port._link
    assert not any(lease.port.has_broken_link for lease in (first, second, draft))
    assert await replies_of(first.port, [verify_request(first)])
    for lease in (first, second, draft):
        lease.release()


async def test_a_broken_link_is_a_lost_engine_though_the_engine_lives_and_the_next_lease_opens_another(leases):
    lease = await leases.take_target("a")
    waiting = asyncio.create_task(replies_of(lease.port, [verify_request(lease, SLOW)]))
    await asyncio.sleep(0.1)
    lease.port._link._transport.abort()
    with pytest.raises(WorkerLost, match=lease.engine_id):
        await waiting
    successor = await leases.take_target("a")
    assert successor.epoch == lease.epoch
    assert successor.engine_id != lease.engine_id, "or its requests would be gathered for the lost link"
    assert await replies_of(successor.port, [verify_request(successor)])
    assert await is_lost(lease)
    lease.release()
    successor.release()


async def test_an_engine_that_dies_within_a_call_is_lost_to_who_waits(leases):
    """Long before its time is up; on a busy machine it takes Ray seconds to kill an actor."""
    lease = await leases.take_target("a")
    waiting = asyncio.create_task(replies_of(lease.port, [verify_request(lease, STUCK)]))
    await asyncio.sleep(0.1)
    ray.kill(lease.port._engine)
    with pytest.raises(WorkerLost, match=f"{lease.engine_id} failed: "):
        await asyncio.wait_for(waiting, 15.0)
    lease.release()
    await until(lambda: has_another_epoch(leases, lease.epoch))


async def test_each_lease_of_a_session_has_a_name_of_its_own(leases):
    first = await leases.take_target("a")
    second = await leases.take_target("a")
    assert first.name != second.name
    first.release()
    second.release()


async def test_both_models_are_described(leases):
    assert await leases.describe_target() == await leases.describe_draft() == INFO


async def test_without_a_draft_there_is_none_to_take():
    leases = ServeLeases(serve.get_deployment_handle("target", APPLICATION), [], Limits())
    with pytest.raises(Unavailable, match="no draft"):
        await leases.take_draft("a")
    with pytest.raises(Unavailable, match="no draft"):
        await leases.describe_draft()
    assert await leases.describe_target() == INFO


async def test_who_finds_no_place_waits_for_one_and_no_longer_than_allowed(leases, new_leases):
    held = [await leases.take_draft(name) for name in ("a", "b")]
    with pytest.raises(Unavailable, match=r"no draft granted a lease within 0\.2 s"):
        await new_leases(lease_timeout_s=0.2).take_draft("c")
    gone, waiting = (asyncio.create_task(leases.take_draft(name)) for name in ("d", "e"))
    await asyncio.sleep(0.2)
    gone.cancel()
    assert not waiting.done()
    held[0].release()
    held[0] = await waiting
    for lease in held:
        lease.release()
    for lease in [await leases.take_draft(name) for name in ("f", "g")]:
        lease.release()


async def test_fifty_leases_that_end_in_any_order_leave_nothing(leases):
    engine, rng = await engine_of(leases), random.Random(0)

    async def live(session: str) -> None:
        lease = await leases.take_target(session)
        try:
            await replies_of(lease.port, [verify_request(lease)])
            await asyncio.sleep(rng.random() / 4)
        finally:
            lease.release()

    tasks = [asyncio.create_task(live(f"s{number}")) for number in range(50)]
    await asyncio.sleep(0.1)
    for task in rng.sample(tasks, 20):
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
    await until(lambda: has_no_sessions(engine))
    places = await asyncio.gather(*(leases.take_target(f"t{number}") for number in range(TARGET.max_sessions)))
    for place in places:
        place.release()


async def test_a_batch_outlives_the_request_that_sent_it():
    front = serve.get_app_handle(APPLICATION)
    request = front.send_slow_batch.remote()
    await until(lambda: front.has_sent.remote())
    request.cancel()
    assert await front.outcome.remote() == "Verdict"


async def test_a_killed_engine_is_lost_at_once_and_replaced_by_its_replica(leases, caplog):
    held = [await leases.take_target("a"), await leases.take_target("b")]
    lease = held[0]
    ray.kill(lease.port._engine)
    with pytest.raises(WorkerLost, match=lease.engine_id):
        await until(lambda: replies_of(lease.port, []))  # what was on its way may still be answered
    successor = await leases.take_target("a")
    assert successor.epoch != lease.epoch
    assert successor.port._replica_id == lease.port._replica_id
    assert await replies_of(successor.port, [verify_request(successor)])
    with pytest.raises(WorkerLost):
        await replies_of(lease.port, [verify_request(lease)])
    said = [record.getMessage() for record in caplog.records if lease.engine_id in record.getMessage()]
    assert said == [f"{lease.engine_id} has died; 2 sessions move to another engine"]
    for each in (*held, successor):
        each.release()


async def test_an_engine_that_fails_at_its_work_is_replaced(leases):
    lease = await leases.take_target("a")
    with pytest.raises(WorkerLost, match="told to fail"):
        await replies_of(lease.port, [verify_request(lease, FAIL)])
    await until(lambda: has_another_epoch(leases, lease.epoch))


async def test_a_replica_whose_engines_die_while_they_load_is_replaced(leases, trap):
    """Perhaps another node does better; and Serve says what is wrong."""
    (before,) = replicas("target")
    lease = await leases.take_target("a")
    trap.touch()
    ray.kill(lease.port._engine)
    await until(lambda: is_gone(before))
    trap.unlink()
    successor = await leases.take_target("a")
    assert successor.port._replica_id != lease.port._replica_id
    successor.release()


async def is_gone(replica: str) -> bool:
    return replica not in replicas("target")


def replicas(role: str) -> set[str]:
    """The names of the replicas' actors that are alive."""
    names = {each["name"] for each in list_named_actors(all_namespaces=True)}
    return {name for name in names if f"{APPLICATION}#{role}#" in name}


async def test_replicas_that_are_to_stop_are_left_and_others_are_not(leases, new_leases):
    """A draft at once; a target after the grace, because what it computed for a session is worth something.

    The tests below need what is deployed here.
    """
    impatient = new_leases(drain_grace_s=0.3)
    held = [await taken("a") for taken in (leases.take_target, leases.take_draft, impatient.take_target)]
    assert (await replicas_now())[0] == frozenset()
    for each in (leases, impatient):
        each.leave(frozenset({"another replica"}))
    assert [await works(lease) for lease in held] == [True, True, True]

    update = asyncio.create_task(asyncio.to_thread(deploy, TWO_SLOW_TO_LOAD, DRAFT))
    await until(lambda: are_stopping(2))
    for each in (leases, impatient):
        each.leave((await replicas_now())[0])
    await until(lambda: has_ended(held[1]))  # though nobody called: a session that rests does not
    assert await is_lost(held[1])
    assert await works(held[0])
    assert await works(held[2])
    await until(lambda: is_lost(held[2]))
    assert await works(held[0])  # its own orchestrator gives it 30 s

    successors = [await leases.take_target("b"), await leases.take_draft("b")]
    assert not {lease.engine_id for lease in held} & {lease.engine_id for lease in successors}
    for lease in (*held, *successors):
        lease.release()
    await update
    assert (await replicas_now())[0] == frozenset()


async def has_ended(lease: ServeLease[Any]) -> bool:
    return "ended" in repr(lease)


async def are_stopping(num_replicas: int) -> bool:
    return len((await replicas_now())[0]) == num_replicas


async def works(lease: ServeLease[Any]) -> bool:
    return not await is_lost(lease)


async def is_lost(lease: ServeLease[Any]) -> bool:
    """Whether the orchestrator's end of the lease refuses calls."""
    try:
        await lease.port.exchange([], print)
    except WorkerLost:
        return True
    return False


@pytest.fixture(scope="module")
def two_targets(application):
    deploy(TWO_SLOW_TO_LOAD, DRAFT)


@pytest.mark.usefixtures("two_targets")
async def test_serve_tells_the_router_where_prompts_have_gone_and_when_their_sessions_have_ended(leases):
    prompt = list(range(200))
    first = await leases.take_target("first", prompt)
    router = router_of(leases)
    (with_prefix,) = router._affinity.with_prefix(prefix_hashes(prompt), router.curr_replicas)
    assert with_prefix.unique_id == first.port._replica_id
    first.release()
    await until(lambda: all_have_left(router))
    places = [await leases.take_target(f"{number}", prompt) for number in range(12)]
    assert len({place.engine_id for place in places}) == 2, "not more than its share"
    for place in places:
        place.release()
    await until(lambda: all_have_left(router))


async def all_have_left(router: PrefixAwareRouter) -> bool:
    """Whether Serve has told the end of every lease."""
    return not router._affinity._num_sessions


def router_of(leases: ServeLeases) -> Any:
    """The router of the targets' handle, in this process."""
    return leases._target._lease._router._asyncio_router.request_router


@pytest.mark.usefixtures("two_targets")
async def test_while_an_engine_loads_sessions_go_elsewhere_and_wait_only_where_there_is_no_other(leases):
    """Without a word a session would go to the replica with fewest sessions: the one whose engine has died."""
    held: list[ServeLease[Any]] = []
    while len({lease.engine_id for lease in held}) < 2:
        held.append(await leases.take_target("first"))
    first, second = held[0], held[-1]
    began_s = time.monotonic()
    ray.kill(first.port._engine)
    await until(lambda: has_ended(first))
    for number in range(4):
        held.append(await leases.take_target(f"moved {number}"))
        assert held[-1].engine_id == second.engine_id
    assert time.monotonic() - began_s < SLOW_LOAD_S

    ray.kill(second.port._engine)
    await until(lambda: has_ended(second))
    held.append(await leases.take_target("waits"))
    assert time.monotonic() - began_s > SLOW_LOAD_S
    for lease in held:
        lease.release()


async def has_another_epoch(leases: ServeLeases, epoch: int) -> bool:
    lease = await leases.take_target("another")
    lease.release()
    return lease.epoch != epoch
