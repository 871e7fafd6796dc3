"""Routing of sessions to replicas: by shared prefix, then by free KV, then by the number of sessions.

The first two count only within bounds. Replicas that have just refused a session come last.

Knows Serve's request routers. KV counts in addition to sessions because contexts differ: a few long ones fill a
replica. Replicas report their KV every two seconds. Serve counts sessions: each orchestrator its own exactly, those of
others as last reported. `deploy.serve.affinity` remembers the prefixes of replicas.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.serve.affinity import Affinity
from deploy.serve.autoscaling import KV_USE

TIER = 0.1
"""Width of a tier in the share of KV in use. Within a tier the number of sessions decides."""
MAX_KV_EXCESS = 0.25
"""A shared prefix decides only if the replica's share of KV in use exceeds the emptiest replica's by less than this."""
STATS_PERIOD_S = 2.0

Name = TypeVar("Name")


class Router(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve has no types for them
    """Routes to replicas that have not refused the session; of these Serve takes the one with the shortest queue."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # else Serve retries without a pause while all are full
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        tiers = after_refusal(self._order(by_id, pending_request), _have_refused(by_id, pending_request))
        return [[by_id[name] for name in tier] for tier in tiers]

    def _order(self, replicas: Mapping[Any, RunningReplica], call: PendingRequest | None) -> list[list[Any]]:  # noqa: ARG002
        return [list(replicas)]


class PrefixAwareRouter(Router):
    """Routes sessions to targets: by shared prefix and by tiers of free KV."""

    def initialize_state(self, **_: Any) -> None:
        """Serve calls this once, before anything else."""
        self._affinity: Affinity[Any] = Affinity()

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Serve calls this, in its event loop, when a replica has taken a call.

        `on_request_completed` cannot be used to learn when the call has ended: Serve also calls it for rejected calls,
        and for a short call possibly before this method.
        """
        self._affinity.began(_prefix(pending_request), replica_id)
        loop = asyncio.get_running_loop()
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._affinity.ended, replica_id))

    def _order(self, replicas: Mapping[Any, RunningReplica], call: PendingRequest | None) -> list[list[Any]]:
        used = {name: float(replica.routing_stats.get(KV_USE, 0.0)) for name, replica in replicas.items()}
        return order(used, self._affinity.with_prefix(_prefix(call), replicas))


def _prefix(call: PendingRequest | None) -> tuple[Any, ...]:
    """The argument `prefix` of `EngineWorker.lease`; empty for other calls."""
    return call.args[1] if call is not None and len(call.args) > 1 else ()


def _have_refused(replicas: Collection[ReplicaID], call: PendingRequest | None) -> set[ReplicaID]:
    """The replicas that have refused the session, from the call's argument `refused_by`."""
    refused_by = call.args[2] if call is not None and len(call.args) > 2 else ()
    return {name for name in replicas if name.unique_id in refused_by} if refused_by else set()


def after_refusal(tiers: Sequence[Sequence[Name]], refused: Collection[Name]) -> list[list[Name]]:
    """The candidates in the same order, but those that have refused at the end."""
    first = [[name for name in tier if name not in refused] for tier in tiers]
    last = [[name for name in tier if name in refused] for tier in tiers]
    return [tier for tier in (*first, *last) if tier]


def order(kv_use: Mapping[Name, float], with_prefix: Collection[Name]) -> list[list[Name]]:
    """First the replicas of `with_prefix` that are not much fuller than the emptiest one, then all others by KV."""
    bound = min(kv_use.values(), default=0.0) + MAX_KV_EXCESS
    first = [name for name in kv_use if name in with_prefix and kv_use[name] < bound]
    others = tiers({name: share for name, share in kv_use.items() if name not in first})
    return [first, *others] if first else others


def tiers(kv_use: Mapping[Name, float]) -> list[list[Name]]:
    """Groups of replicas with about the same share of KV in use, the emptiest first."""
    groups: dict[int, list[Name]] = defaultdict(list)
    for name, share in kv_use.items():
        groups[int(share / TIER)].append(name)
    return [groups[number] for number in sorted(groups)]


def draft_router() -> RequestRouterConfig:
    return RequestRouterConfig(request_router_class=f"{__name__}:{Router.__name__}")


def target_router() -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=f"{__name__}:{PrefixAwareRouter.__name__}", request_routing_stats_period_s=STATS_PERIOD_S
    )
