"""Which replicas run and which are about to stop, for the sessions that hold leases on them.

Serve does not notify a replica's code that it drains, so its controller is asked for the status. This is the only
module that does so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ReplicaState


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of all deployments, as Serve's controller sees them."""

    stopping: frozenset[str]
    """Ids of replicas that drain."""
    num_running: Mapping[str, int]
    """Number of running replicas by deployment."""


async def replicas_now() -> Replicas:
    """Ask Serve's controller. Raises: RayError."""
    controller: Any = _get_global_client()._controller
    details: dict[str, Any] = await controller.get_serve_instance_details.remote()
    found = [
        (name, replica)
        for application in details["applications"].values()
        for name, deployment in application["deployments"].items()
        for replica in deployment["replicas"]
    ]
    return Replicas(
        frozenset(replica["replica_id"] for _, replica in found if replica["state"] == ReplicaState.STOPPING),
        Counter(name for name, replica in found if replica["state"] == ReplicaState.RUNNING),
    )
