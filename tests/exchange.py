"""The replies of an engine's port to one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.records import is_last


async def replies_of(port: Any, batch: Sequence[Any]) -> list[Any]:
    """Send the batch; returns the last reply to each request, in the order of the requests."""
    last: dict[Any, Any] = {}

    def take(reply: Any) -> None:
        if is_last(reply):
            assert reply.stamp not in last, "a request ends once"
            last[reply.stamp] = reply

    await port.exchange(batch, take)
    return [last[request.stamp] for request in batch]
