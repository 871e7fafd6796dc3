"""Which replicas are about to stop, for those who hold leases on them.

Serve tells a replica that it drains, but not the code that runs in it; what its status page shows, its controller says
to whoever asks. This module alone knows how.
"""

from __future__ import annotations

from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ReplicaState


async def stopping_replicas() -> frozenset[str]:
    """Ids of the replicas, of any deployment, that end what they have begun and take nothing new. Raises: RayError."""
    controller: Any = _get_global_client()._controller
    details: dict[str, Any] = await controller.get_serve_instance_details.remote()
    return frozenset(
        replica["replica_id"]
        for application in details["applications"].values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == ReplicaState.STOPPING
    )
