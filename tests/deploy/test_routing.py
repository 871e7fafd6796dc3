from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deploy.routing import RoomiestRouter, tiers
from deploy.scaling import KV_USE


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


def replica(name: str, **stats: float) -> Any:
    return SimpleNamespace(replica_id=name, routing_stats=stats)


async def test_a_router_waits_between_tries_and_offers_tier_after_tier():
    """Serve's loop goes on without a pause unless it is told to back off: an orchestrator would do nothing else."""
    waiting: Any = SimpleNamespace(routing_context=SimpleNamespace(should_backoff=False))
    full, fresh, empty = replica("full", **{KV_USE: 0.9}), replica("fresh"), replica("empty", **{KV_USE: 0.02})
    router = RoomiestRouter.__new__(RoomiestRouter)
    assert await router.choose_replicas([full, fresh, empty], waiting) == [[fresh, empty], [full]]
    assert waiting.routing_context.should_backoff
    assert await router.choose_replicas([], None) == []


def test_serve_s_loop_asks_for_that_flag():
    """Should Ray rename it, a router that sets it would spin again."""
    from ray.serve._private.request_router.common import RequestRoutingContext

    assert RequestRoutingContext().should_backoff is False
