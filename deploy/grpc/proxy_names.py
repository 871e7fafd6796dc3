"""What a call through Serve's gRPC proxy is named by: in its metadata on the way in, in its trailers on the way out.

Knows `deploy.calls` and how Serve asks a call's context; must not know what the call does.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from deploy import calls

Handler = Callable[..., Any]

SERVES_REQUEST_ID = "request_id"
"""Metadata by which Serve names a call in its own logs."""


def identified(handler: Handler) -> Handler:
    """The same handler for calls that have a request id, which their trailing metadata tell."""

    async def unary(messages: AsyncIterator[bytes], context: Any) -> bytes:
        calls.begin(context.invocation_metadata())
        answer: bytes = await handler(messages, context)
        _echo(context)
        return answer

    async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        calls.begin(context.invocation_metadata())
        replies = handler(messages, context)
        try:
            async for reply in replies:
                yield reply
        finally:
            await replies.aclose()
        _echo(context)

    return stream if inspect.isasyncgenfunction(handler) else unary


def _echo(context: Any) -> None:
    """An error that an orchestrator has told has them already."""
    trailers, call = list(context.trailing_metadata()), calls.current()
    if call is not None and all(key != calls.REQUEST_ID for key, _ in trailers):
        context.set_trailing_metadata([*trailers, *call.headers])


def trailers() -> tuple[tuple[str, str], ...]:
    """Of an error that is said by code and message alone."""
    call = calls.current()
    return call.headers if call is not None else ()


class LastingContext:
    """A call's context whose peer can still be read when the call is done, as Serve does for its access log.

    gRPC reads the peer from the call itself, and crashes the process once that is gone. Its metadata name the call, for
    Serve, too.
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
