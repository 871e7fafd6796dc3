"""Finds the engines of a running application."""

from __future__ import annotations

from typing import Any

from ray import serve

from deploy.app import APPLICATION
from deploy.serve import LeaseGrant, Refusal

LEASES_EACH = 8
"""Largest number of leases taken per replica before the search gives up."""


async def engine_of(role: str) -> Any:
    """The engine actor of one replica of `role` (target or draft). Takes a lease and ends it at once."""
    stream = _lease_stream(role)
    try:
        return (await _granted(stream)).engine
    finally:
        stream.cancel()


async def engines_of(role: str, num_replicas: int) -> list[Any]:
    """The engine actors of all `num_replicas` replicas of `role`.

    Holds all leases until the end, so that Serve sends each to another replica. Raises: RuntimeError.
    """
    found: dict[str, Any] = {}
    held: list[Any] = []
    try:
        for _ in range(LEASES_EACH * num_replicas):
            held.append(_lease_stream(role))
            grant = await _granted(held[-1])
            found[grant.engine_id] = grant.engine
            if len(found) == num_replicas:
                return list(found.values())
    finally:
        for stream in held:
            stream.cancel()
    raise RuntimeError(f"found {len(found)} of {num_replicas} engines of {role}: {sorted(found)}; check `serve status`")


def _lease_stream(role: str) -> Any:
    handle = serve.get_deployment_handle(role, APPLICATION)
    return handle.options(stream=True).lease.remote("probe")


async def _granted(stream: Any) -> LeaseGrant:
    answer: LeaseGrant | Refusal = await anext(stream)
    if isinstance(answer, Refusal):
        raise RuntimeError(f"the engine of {answer.replica_id} is loading")  # noqa: TRY004  the type is no mistake
    return answer
