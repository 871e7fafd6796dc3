"""Handles a call in the process of Serve's HTTP proxy, before and after the orchestrator.

Calls bypass Serve's own handler (Ray 2.60). There, the replica calls back into the proxy twice for each call, for the
body and for the disconnect; such an actor call takes 2 to 100 ms on busy processors. Here the whole body is read,
within a limit, and sent with the call, like a gRPC message. Admission is shared with gRPC in this process. If a client
disconnects, its call is cancelled in the orchestrator. A slow reader slows down only its own stream: the next piece is
requested from the orchestrator after the last one has been sent.

Runs in the proxy's process, which imports it by the name in `deploy.launch.cluster.PREPARE`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import aclosing, contextmanager
from typing import Any

from ray.serve import context as serve_context
from ray.serve._private.proxy_response_generator import ProxyResponseGenerator

from core.errors import DeadlinePassed, Unavailable, first_line
from deploy import calls
from deploy.api import ProxyAdmission, admission_behind
from deploy.files import is_to_stop
from deploy.http.failures import BodyEncoded, BodyTooLong, Failure, failure_of
from deploy.http.routes import COMPLETIONS, HEALTH, JSON_GROWTH
from deploy.http.wire import Call, Head

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 8 * 2**20
"""Longest body, the same as for a gRPC message (deploy.launch.cluster.MAX_MESSAGE_BYTES)."""
SERVES_OWN = frozenset({"/-/healthz", "/-/routes"})
"""Paths that Serve answers itself: its health, for probes, and its routes."""
PLAIN = "identity"
"""The content encoding that changes nothing."""
READ_TIMEOUT_S = 60.0
"""Seconds for a body to arrive."""


class HttpProxy:
    """ASGI application for all paths but Serve's own. `app` is Serve's HTTP server."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._proxy = app._app  # Serve's wrapper only adds request ids (Ray 2.60)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"] in SERVES_OWN:
            await self._app(scope, receive, send)
            return
        exchange = _HttpExchange(scope, receive, send)
        # Serve's own logs show this id, here and in the replica (Ray 2.60).
        serve_context._serve_request_context.set(serve_context._RequestContext(request_id=exchange.name.request_id))
        try:
            with self._counted():
                await self._answer(exchange)
        except Exception as error:  # noqa: BLE001 - the outermost handler: no client may see a stack trace
            await exchange.fail(failure_of(error, exchange.path))
        await exchange.end()

    @property
    def _admission(self) -> ProxyAdmission:
        return admission_behind(self._proxy.proxy_router)

    async def _answer(self, exchange: _HttpExchange) -> None:
        """Raises: OutriderError."""
        is_completion = exchange.path in COMPLETIONS
        if exchange.path == HEALTH and (self._proxy._is_draining() or is_to_stop()):
            raise Unavailable("this node is about to stop; repeat the call")
        admission = self._admission
        admission.arrived(is_completion=is_completion)
        with admission.reading() as count:
            call = await exchange.call(_most_bytes(admission), count)
        with admission.call(is_completion=is_completion), admission.waiting(len(call.body)) as answered:
            await admission.turn()
            async with aclosing(self._parts(call, exchange)) as parts:
                async for part in parts:
                    answered()
                    await exchange.write(part)

    async def _parts(self, call: Call, exchange: _HttpExchange) -> AsyncGenerator[Head | bytes, None]:
        """The orchestrator's reply; it ends early if the client disconnects. Raises: Unavailable."""
        found = self._proxy.proxy_router.get_handle_for_endpoint("")
        if found is None:
            raise Unavailable("the service is starting; try again")
        handle = found[1].options(stream=True, method_name="http")
        gone = asyncio.create_task(exchange.until_gone())
        parts = ProxyResponseGenerator(handle.remote(call), disconnected_task=gone)
        try:
            async for part in parts:
                yield part
        except asyncio.CancelledError:
            if not gone.done():
                raise
        except Exception as error:
            name = call.name.request_id
            logger.warning("call %s failed between proxy and orchestrator: %s", name, first_line(error))
            raise Unavailable("the orchestrator of this call was lost; repeat it") from error
        finally:
            gone.cancel()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the call in Serve's proxy: a draining proxy waits for its calls."""
        self._proxy._ongoing_requests_start()
        try:
            yield
        finally:
            self._proxy._ongoing_requests_end()


def _most_bytes(admission: ProxyAdmission) -> int:
    known = admission.max_bytes
    return MAX_BODY_BYTES if known is None else min(MAX_BODY_BYTES, JSON_GROWTH * known)


class _HttpExchange:
    """One ASGI request and its reply."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._has_begun = False
        self._head: Head | None = None
        """Sent with the first bytes of the body, so that losing the orchestrator before that gives an error status."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.name = calls.begin(self._headers.items())

    async def call(self, most_bytes: int, count: Callable[[int], None]) -> Call:
        """The request, read to its end; `count` gets the size of each piece. Raises: RequestError."""
        encoding = self._headers.get("content-encoding", PLAIN)
        if encoding.lower() != PLAIN:
            raise BodyEncoded(encoding)
        authorization = self._headers.get("authorization")
        if authorization is None and (key := self._headers.get("x-api-key")) is not None:
            authorization = f"Bearer {key}"  # Anthropic's clients send their key this way
        try:
            body = await asyncio.wait_for(self._body(most_bytes, count), READ_TIMEOUT_S)
        except TimeoutError:
            raise DeadlinePassed(f"the body has not arrived within {READ_TIMEOUT_S:g} s") from None
        return Call(self.method, self.path, authorization, self.name, body)

    async def _body(self, most_bytes: int, count: Callable[[int], None]) -> bytes:
        announced = self._headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most_bytes:
            raise BodyTooLong(most_bytes)
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Unavailable("the client went away")
            piece = message.get("body", b"")
            count(len(piece))
            body += piece
            if len(body) > most_bytes:
                raise BodyTooLong(most_bytes)
            if not message.get("more_body", False):
                return bytes(body)

    async def until_gone(self) -> None:
        """Return when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def write(self, part: Head | bytes) -> None:
        """Send a part; wait until the connection can accept more."""
        if isinstance(part, Head):
            self._head = part
            return
        await self._begin()
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _begin(self) -> None:
        if self._head is None:
            return
        head, self._head, self._has_begun = self._head, None, True
        headers = [(name.encode(), value.encode()) for name, value in (*head.headers, *self.name.headers)]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def fail(self, failure: Failure) -> None:
        """Send the failure as the reply, or as the last event of a stream that has begun."""
        if self._has_begun:
            await self.write(failure.event)
        else:
            await self.write(failure.head)
            await self.write(failure.body)

    async def end(self) -> None:
        await self._begin()
        if self._has_begun:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
