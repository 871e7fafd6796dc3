"""The admission of one Serve proxy process, shared by its gRPC and HTTP layers.

Asks the orchestrators for their limits; `deploy.api.proxy.admission` does the counting. Runs in the proxy's process.
Knows Serve (Ray 2.60).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from core.errors import Overloaded
from deploy.api.proxy.admission import Places, ProxyAdmission
from deploy.metrics import REQUEST_FAILURE, ServeRecorder


@cache
def admission_behind(router: Any) -> ProxyAdmission:
    """The proxy's only admission. `router` is Serve's ProxyRouter; a process has one."""
    return ProxyAdmission(lambda: _places_behind(router), _count_refusal)


async def _places_behind(router: Any) -> Sequence[Places]:
    """The limits of the application's orchestrators."""
    found = router.get_handle_for_endpoint("")
    if found is None:
        return ()
    from ray import serve  # the rest of this package is also used without Ray

    name = found[1].deployment_id.app_name
    handle = await asyncio.to_thread(serve.get_app_handle, name)  # Serve asks its controller, and waits
    places: list[Places] = await handle.broadcast("places").results_async()
    return places


def _count_refusal(model_name: str) -> None:
    """Count a refusal in the orchestrators' metric."""
    _recorder(model_name)(REQUEST_FAILURE, 1, Overloaded.status)


@cache
def _recorder(model_name: str) -> ServeRecorder:
    return ServeRecorder(model_name, (REQUEST_FAILURE,))
