from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.serve.affinity import prefix_hashes
from deploy.serve.autoscaling import KV_USE
from deploy.serve.routing import PrefixAwareRouter, Router, after_refusal, order, tiers


@pytest.mark.parametrize(
    ("kv_use", "expected"),
    [
        ({}, []),
        ({"a": 0.0}, [["a"]]),
        ({"a": 0.72, "b": 0.11, "c": 0.19}, [["b", "c"], ["a"]]),
        ({"a": 1.0, "b": 0.95, "c": 0.0}, [["c"], ["b"], ["a"]]),
    ],
)
def test_the_emptiest_come_first_and_small_differences_do_not_count(kv_use, expected):
    assert tiers(kv_use) == expected


@pytest.mark.parametrize(
    ("kv_use", "with_prefix", "expected"),
    [
        ({"a": 0.0, "b": 0.2}, {"b"}, [["b"], ["a"]]),
        ({"a": 0.0, "b": 0.3}, {"b"}, [["a"], ["b"]]),
        ({"a": 0.5, "b": 0.7, "c": 0.72}, {"b", "c"}, [["b", "c"], ["a"]]),
        ({"a": 0.0}, {"gone"}, [["a"]]),
    ],
)
def test_who_knows_the_prompt_comes_first_unless_he_is_much_fuller(kv_use, with_prefix, expected):
    assert order(kv_use, with_prefix) == expected


def replica(name: str, **stats: float) -> Any:
    return SimpleNamespace(replica_id=name, routing_stats=stats)


class FakeId(str):
    """The part of Serve's ReplicaID that counts."""

    @property
    def unique_id(self) -> str:
        return str(self)


def new_router() -> PrefixAwareRouter:
    router = PrefixAwareRouter.__new__(PrefixAwareRouter)
    router.initialize_state()
    return router


async def test_sessions_with_one_prompt_go_to_one_replica_until_it_has_more_than_its_share():
    call: Any = SimpleNamespace(
        routing_context=SimpleNamespace(should_backoff=False), args=["session", prefix_hashes(range(200))]
    )
    router, (a, b) = new_router(), (replica("a"), replica("b"))
    assert await router.choose_replicas([a, b], call) == [[a, b]]
    first, second = FakeResult(), FakeResult()
    router.on_request_routed(call, "b", first)
    assert await router.choose_replicas([a, b], call) == [[b], [a]]
    router.on_request_routed(call, "b", second)
    assert await router.choose_replicas([a, b], call) == [[a, b]]
    router.on_request_completed("b", "of a call that a full replica has sent away")
    assert await router.choose_replicas([a, b], call) == [[a, b]]
    await asyncio.to_thread(first.end)
    assert await router.choose_replicas([a, b], call) == [[b], [a]]


async def test_a_call_that_has_ended_when_serve_tells_of_it_does_not_count_for_ever():
    router = new_router()
    ended = FakeResult()
    ended.end()
    router.on_request_routed(SimpleNamespace(args=["session"]), "a", ended)
    await asyncio.sleep(0)
    assert not router._affinity._num_sessions


class FakeResult:
    """A call's result in Serve, which tells of its end from another thread, or at once if that was before."""

    def __init__(self):
        self._callbacks: list[Callable[[object], object]] = []
        self._has_ended = False

    def add_done_callback(self, callback):
        if self._has_ended:
            callback(None)
        self._callbacks.append(callback)

    def end(self):
        self._has_ended = True
        for callback in self._callbacks:
            callback(None)


async def test_a_router_waits_between_tries_and_offers_tier_after_tier():
    """Serve's loop goes on without a pause unless it is told to back off: an orchestrator would do nothing else."""
    waiting: Any = SimpleNamespace(routing_context=SimpleNamespace(should_backoff=False), args=["session"])
    full, fresh, empty = replica("full", **{KV_USE: 0.9}), replica("fresh"), replica("empty", **{KV_USE: 0.02})
    router = new_router()
    assert await router.choose_replicas([full, fresh, empty], waiting) == [[fresh, empty], [full]]
    assert waiting.routing_context.should_backoff
    assert await router.choose_replicas([], None) == []


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (set(), [["a", "b"], ["c"]]),
        ({"a"}, [["b"], ["c"], ["a"]]),
        ({"a", "b"}, [["c"], ["a", "b"]]),
        ({"a", "b", "c"}, [["a", "b"], ["c"]]),
    ],
)
def test_who_has_refused_comes_last_and_does_come(refused, expected):
    assert after_refusal([["a", "b"], ["c"]], refused) == expected


@pytest.mark.parametrize("kind", [Router, PrefixAwareRouter])
async def test_a_session_says_who_has_refused_it(kind):
    refused, other = (replica(FakeId(name)) for name in ("refused", "other"))
    call: Any = SimpleNamespace(
        routing_context=SimpleNamespace(should_backoff=False), args=["session", (), frozenset({"refused"})]
    )
    router = kind.__new__(kind)
    router.initialize_state()
    assert await router.choose_replicas([refused, other], call) == [[other], [refused]]
    assert await router.choose_replicas([refused], call) == [[refused]]
    call.args.pop()
    assert await router.choose_replicas([refused, other], call) == [[refused, other]]


def test_serve_s_loop_asks_for_that_flag():
    """Should Ray rename it, a router that sets it would spin again."""
    from ray.serve._private.request_router.common import RequestRoutingContext

    assert RequestRoutingContext().should_backoff is False
