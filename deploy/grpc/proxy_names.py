"""Request ids of calls through Serve's gRPC proxy, from the call's metadata to its trailing metadata.

Knows `deploy.calls` and how Serve uses a call's context; must not know the methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deploy import calls

SERVES_REQUEST_ID = "request_id"
"""Metadata key of the id in Serve's own logs."""


@contextmanager
def identified(context: Any) -> Iterator[None]:
    """Give the call a request id, which is in its trailing metadata at the end, unless the block raises."""
    calls.begin(context.invocation_metadata())
    yield
    # The orchestrator may have added the headers already.
    trailers, call = list(context.trailing_metadata()), calls.current()
    if call is not None and all(key != calls.REQUEST_ID for key, _ in trailers):
        context.set_trailing_metadata([*trailers, *call.headers])


def trailers() -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an error without details."""
    call = calls.current()
    return call.headers if call is not None else ()


class LastingContext:
    """A call's context whose peer can still be read after the call has ended, as Serve does for its access log.

    gRPC reads the peer from the call object, and crashes the process if that is gone. This context's metadata include
    the request id under the key that Serve reads.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer: str = context.peer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        sent, call = list(self._context.invocation_metadata()), calls.current()
        if call is None:
            return sent
        own = {calls.REQUEST_ID, SERVES_REQUEST_ID}
        request_id = call.headers[0][1]
        return [*(pair for pair in sent if pair[0] not in own), *((name, request_id) for name in own)]

    def peer(self) -> str:
        return self._peer
