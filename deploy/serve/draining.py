"""Tells sessions which of the replicas that they hold leases on are about to stop.

Serve does not notify a replica's code that it drains, so its controller is asked for the status. This is the only
module that does so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ReplicaState


async def replicas_now() -> tuple[frozenset[str], Mapping[str, int]]:
    """The ids of replicas that drain, and the number of running ones by deployment. Raises: RayError."""
    controller: Any = _get_global_client()._controller
    details: dict[str, Any] = await controller.get_serve_instance_details.remote()
    found = [
        (name, replica)
        for application in details["applications"].values()
        for name, deployment in application["deployments"].items()
        for replica in deployment["replicas"]
    ]
    return (
        frozenset(replica["replica_id"] for _, replica in found if replica["state"] == ReplicaState.STOPPING),
        Counter(name for name, replica in found if replica["state"] == ReplicaState.RUNNING),
    )
