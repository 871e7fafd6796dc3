"""A look at the engines behind a running application, for benchmarks, tests and operators."""

from __future__ import annotations

from typing import Any

from ray import serve

from deploy.app import APPLICATION
from deploy.workers import LeaseGrant


async def engine_of(role: str) -> Any:
    """The engine actor of one replica of `role` (target or draft), by way of a lease that is given back at once."""
    handle = serve.get_deployment_handle(role, APPLICATION)
    stream: Any = handle.options(stream=True).lease.remote("probe")
    grant: LeaseGrant = await anext(stream)
    stream.cancel()
    return grant.engine
