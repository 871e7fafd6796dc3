"""Which target takes the next session: one with room in its KV, and among those the one with the fewest sessions.

Knows Serve's request routers. Sessions count, and KV counts because contexts differ: a few long ones fill a
replica that has hardly any sessions. How full it is a replica says every two seconds; between that, Serve's own
count of its ongoing requests, which are its sessions, is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from deploy.scaling import KV_USE

TIER = 0.1
"""KV that differs by less does not matter, sessions then do."""
STATS_PERIOD_S = 2.0

Name = TypeVar("Name")


class RoomiestRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve has no types for them
    """Tries tier after tier; within one, Serve asks every replica for its queue and takes the shortest that accepts."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002  all sessions are alike
    ) -> list[list[RunningReplica]]:
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
