"""Reads the messages of calls as bytes, any number of them, within limits.

The limits also cover callers that open calls and send nothing. Runs in the process of Serve's gRPC proxy. Knows how
methods are registered with gRPC's server; must not know message types.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from core.errors import DeadlinePassed, Overloaded
from deploy.api import RETRY_S

READ_TIMEOUT_S = 60.0
"""Seconds for a call's message to arrive; HTTP has the same limit for a body."""
MAX_UNREAD_CALLS = 4096
"""Most calls at once whose message has not arrived; each takes about 30 KB. A burst of complete calls stays far below:
their messages are there when they are accepted."""


class Reader:
    """Limits the reading of one proxy's calls."""

    def __init__(self, timeout_s: float = READ_TIMEOUT_S, max_unread: int = MAX_UNREAD_CALLS) -> None:
        self._timeout_s = timeout_s
        self._max_unread = max_unread
        self._num_unread = 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Limit the time to read one call, and the number of unread calls. Raises: Overloaded, DeadlinePassed."""
        if self._num_unread >= self._max_unread:
            problem = f"{self._max_unread} calls have sent no message yet; try again in {RETRY_S:g} s"
            raise Overloaded(problem, RETRY_S)
        self._num_unread += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise DeadlinePassed(f"the message of the call did not arrive within {self._timeout_s:g} s") from None
        finally:
            self._num_unread -= 1


@cache
def reader_behind(router: Any) -> Reader:  # noqa: ARG001 - the cache's key
    """The proxy's only reader. `router` is Serve's ProxyRouter; a process has one."""
    return Reader()


class RawServer:
    """Registers methods with a server so that they take bytes, and any number of messages.

    gRPC by itself reads only the first message of a unary call, and does not answer a call without a message. It
    reports a message that it cannot decode as UNKNOWN, with the name of a Python class.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            handler._method_handlers = _taking_bytes(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(service, _taking_bytes(methods))


def _taking_bytes(methods: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each._replace(request_streaming=True, request_deserializer=None) for name, each in methods.items()}
