"""Which target takes the next session: one with room in its KV, and among those one with few sessions.

Knows Serve's request routers. Sessions count, and KV counts because contexts differ: a few long ones fill a replica
that has hardly any sessions. How full it is a replica says every two seconds; how many sessions it has Serve counts:
each orchestrator its own exactly, and those of others as of its last look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from deploy.scaling import KV_USE

TIER = 0.1
"""Within so much of KV in use, sessions decide."""
STATS_PERIOD_S = 2.0

Name = TypeVar("Name")


class RoomiestRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve has no types for them
    """Tries tier after tier; within one, Serve takes the replica with the shortest queue that accepts."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # or Serve would try again without a pause while all are full
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        used = {name: float(replica.routing_stats.get(KV_USE, 0.0)) for name, replica in by_id.items()}
        return [[by_id[name] for name in tier] for tier in tiers(used)]


def tiers(kv_use: Mapping[Name, float]) -> list[list[Name]]:
    """Those with about the same share of their KV in use together, the emptiest first."""
    groups: dict[int, list[Name]] = defaultdict(list)
    for name, share in kv_use.items():
        groups[int(share / TIER)].append(name)
    return [groups[number] for number in sorted(groups)]


def target_router() -> RequestRouterConfig:
    """For the deployments of targets."""
    return RequestRouterConfig(
        request_router_class=f"{__name__}:{RoomiestRouter.__name__}", request_routing_stats_period_s=STATS_PERIOD_S
    )
