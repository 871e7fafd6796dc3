"""The replicas that are about to stop, for the sessions that hold leases on them.

Serve does not tell the code in a replica that it drains; its controller gives the state of its status page. This module
alone knows how to ask.
"""

from __future__ import annotations

from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ReplicaState


async def stopping_replicas() -> frozenset[str]:
    """Ids of the draining replicas, of all deployments. Raises: RayError."""
    controller: Any = _get_global_client()._controller
    details: dict[str, Any] = await controller.get_serve_instance_details.remote()
    return frozenset(
        replica["replica_id"]
        for application in details["applications"].values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == ReplicaState.STOPPING
    )
