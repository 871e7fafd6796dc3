"""Handles a call in the process of Serve's gRPC proxy, before and after the orchestrator.

Serve's own handlers (Ray 2.60) lack some properties that callers may expect. They are wrapped here:

- *One message per call, as bytes.* A call with no message or several is refused, as is one whose message does not
  arrive (`deploy.grpc.reading`). Bytes are decoded where an error can be reported.
- *Overload* is refused before Serve's router, where a call would wait for its refusal (`deploy.api.proxy.admission`).
- *Errors* arrive as a status with a last message, which is dropped. Errors of streams thus have details too, and none
  is raised and logged with a trace on the way. Serve's own errors are reworded for callers.
- *Cancellation.* Serve's proxy passes it on only while it waits for the replica's next message. If it comes while a
  message is being written to the client, the stream is dropped, and the replica decodes until the output is complete.
  Here a dropped stream waits for the next message once more, and is cancelled there.
- *Request ids.* Each call has one, given by the caller or generated. It is passed to Serve and the orchestrator, and
  returned in the trailing metadata, with the trace context (`deploy.calls`).
- *Deadlines* in messages are kept to the millisecond (`deploy.grpc.proxy_deadline`).
- *Health* is that of the application. A proxy on a draining node also reports NOT_SERVING itself, so that load
  balancers stop using it in time. Ray takes seconds to report draining; the stop file of the node is seen at once.

Runs in the proxy's process, which imports it by the name in `deploy.launch.cluster.SERVICERS`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS
from ray.serve._private.proxy_request_response import gRPCStreamingType

from core.errors import OutriderError, Overloaded, RequestError, Unavailable
from deploy import calls
from deploy.api import RETRY_S, ProxyAdmission, admission_behind
from deploy.files import is_to_stop
from deploy.grpc.proxy_deadline import with_deadline
from deploy.grpc.proxy_names import LastingContext, identified, trailers
from deploy.grpc.reading import RawServer, Reader, reader_behind
from deploy.grpc.status import DETAILS_KEY, status_of
from protos.outrider.v1 import generation_pb2_grpc

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
_Read = tuple[bytes, Callable[[], None]]
"""A message, and the function to call with each answer to it."""

MAX_PENDING_CALLS = 50_000
"""Most calls that wait for the server to accept them; gRPC cancels further ones. Each takes a few kilobytes."""
COMPLETIONS = frozenset({"Generate", "GenerateStream"})
"""Methods that count as completions in admission."""
ONE_MESSAGE = "this method takes one message"
_OF_ONE = {
    gRPCStreamingType.STREAM_UNARY: gRPCStreamingType.UNARY_UNARY,
    gRPCStreamingType.STREAM_STREAM: gRPCStreamingType.UNARY_STREAM,
}
"""The streaming type of the matching handler in Serve, which takes a single message."""

SERVES_OWN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
"""Status codes with which Serve ends a call whose replica has died. A caller that cancels sees neither."""

NOT_SERVING: bytes = health_pb2.HealthCheckResponse(
    status=health_pb2.HealthCheckResponse.NOT_SERVING
).SerializeToString()


CONNECTION_OPTIONS = (
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 32 * 1024),
    ("grpc.max_concurrent_streams", 4096),
)
"""Options of each connection. It is closed after ten minutes without a call. Clients may send keep-alive pings every
ten seconds; gRPC's default of five minutes breaks the streams of clients that ping more often. The size of metadata
has a soft and a hard limit, in bytes. Calls beyond the limit on concurrent ones wait in the client; gRPC's default
limit is 2 billion."""


def take_bursts() -> None:
    """Make Serve's gRPC servers accept bursts and limit connections. Must run before one is created.

    By default gRPC cancels calls without a reason if more than a thousand wait to be accepted, so that a burst could
    not be refused properly. Serve has no setting for this.
    """
    DEFAULT_GRPC_SERVER_OPTIONS.extend(
        [
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
            *CONNECTION_OPTIONS,
        ]
    )


def add_generation_service(servicer: Any, server: Any) -> None:
    """Register the service's methods, for Serve. `server` is its gRPC server, which creates the handlers."""
    router = _proxy_of(server).proxy_router
    admission, reader = admission_behind(router), reader_behind(router)

    def wrap(handler: Handler, method: str) -> Handler:
        is_completion = method in COMPLETIONS
        explained = refusing(handler)
        inner = with_deadline(explained) if is_completion else explained
        return admitted(inner, admission, reader, is_completion=is_completion)

    with _wrapped(server, wrap):
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, RawServer(server))


def add_health_service(servicer: Any, server: Any) -> None:
    """Like `add_generation_service`, for Health."""
    proxy = _proxy_of(server)
    reader = reader_behind(proxy.proxy_router)

    def wrap(handler: Handler, method: str) -> Handler:
        is_check = method == "Check" and not inspect.isasyncgenfunction(handler)
        refused = refusing(with_draining(handler, proxy._is_draining) if is_check else handler)
        return one_message(refused, reader)

    with _wrapped(server, wrap):
        health_pb2_grpc.add_HealthServicer_to_server(servicer, RawServer(server))


def _proxy_of(server: Any) -> Any:
    """Serve's proxy: the handler factory is one of its methods (Ray 2.60)."""
    return server.service_handler_factory.__self__


@contextmanager
def _wrapped(server: Any, wrap: Callable[[Handler, str], Handler]) -> Iterator[None]:
    """Within the `with` block, `server` applies `wrap` to Serve's handlers."""
    make_handler = server.service_handler_factory

    def make(service_method: str, streaming_type: gRPCStreamingType) -> Handler:
        handler = make_handler(
            service_method=service_method, streaming_type=_OF_ONE.get(streaming_type, streaming_type)
        )
        return wrap(handler, service_method.rpartition("/")[2])

    server.service_handler_factory = make
    try:
        yield
    finally:
        server.service_handler_factory = make_handler


def one_message(handler: Handler, reader: Reader | None = None) -> Handler:
    """A handler for a stream of messages that must hold exactly one.

    Any other number is refused with UNIMPLEMENTED, as gRPC specifies.
    """
    reader = reader or Reader()

    @asynccontextmanager
    async def call(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[_Read]:
        try:
            message = await _only(messages, context, reader)
        except RequestError as error:
            await _abort(context, error)
        yield message, _ignore_answer

    return _taking(handler, call)


def _ignore_answer() -> None:
    """Do nothing: these answers are not counted."""


def _taking(handler: Handler, call: Callable[..., AbstractAsyncContextManager[_Read]]) -> Handler:
    """A handler for a stream of messages. It gets the only message from `call`, and answers within that context.

    Each call has a request id.
    """

    async def unary(messages: AsyncIterator[bytes], context: Any) -> bytes:
        with identified(context):
            async with call(messages, context) as (message, _):
                answer: bytes = await handler(message, context)
                return answer

    async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        with identified(context):
            async with call(messages, context) as (message, answered), aclosing(handler(message, context)) as replies:
                async for reply in replies:
                    answered()
                    yield reply

    return stream if inspect.isasyncgenfunction(handler) else unary


async def _only(messages: AsyncIterator[bytes], context: Any, reader: Reader) -> bytes:
    """The only message of a call. Returns when the caller has closed its stream of messages.

    Raises: Overloaded, DeadlinePassed.
    """
    only: bytes | None = None
    async with reader.reading():
        async for message in messages:
            if only is not None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{ONE_MESSAGE}, got more", trailers())
            only = message
    if only is None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{ONE_MESSAGE}, got none", trailers())
        raise AssertionError("abort raises")
    return only


def admitted(
    handler: Handler, admission: ProxyAdmission, reader: Reader | None = None, *, is_completion: bool
) -> Handler:
    """The handler with admission: it refuses overload and messages that are too long.

    Capacity is checked before the message is read, and again when it is complete: a caller that sends nothing does not
    count.
    """
    reader = reader or Reader()

    @asynccontextmanager
    async def call(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[_Read]:
        try:
            admission.arrived(is_completion=is_completion)
            message = await _only(messages, context, reader)
            admission.check_length(len(message))
            with admission.call(is_completion=is_completion), admission.waiting(len(message)) as answered:
                await admission.turn()
                yield message, answered
        except RequestError as error:
            await _abort(context, error)

    return _taking(handler, call)


def refusing(handler: Handler) -> Handler:
    """Serve's handler with this project's errors, and with cancellation of streams that the client drops."""

    async def unary(message: bytes, context: Any) -> bytes:
        answer: bytes = await handler(message, LastingContext(context))
        _explain(context)
        return answer

    async def stream(message: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        replies = handler(message, LastingContext(context))
        try:
            async for reply in replies:
                if not context.code():  # the last message only carries the status
                    yield reply
        except GeneratorExit:
            await _cancel(replies)
            raise
        _explain(context)

    return stream if inspect.isasyncgenfunction(handler) else unary


def _explain(context: Any) -> None:
    """Reword one of Serve's own errors, which have no details."""
    if any(key == DETAILS_KEY for key, _ in context.trailing_metadata()):
        return
    if context.code() in SERVES_OWN:
        call, reason = calls.current(), context.details().partition("\n")[0]
        name = call.request_id if call is not None else "without a name"
        logger.warning("call %s failed between proxy and orchestrator: %s", name, reason)
        _set_error(context, Unavailable("the orchestrator of this call was lost; repeat it, or resume its output"))
    elif context.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        _set_error(context, Overloaded(f"too many calls are waiting; try again in {RETRY_S:g} s", RETRY_S))


def _set_error(context: Any, error: OutriderError) -> None:
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    context.set_trailing_metadata([*context.trailing_metadata(), *status.to_trailers()])


async def _abort(context: Any, error: OutriderError) -> NoReturn:
    status = status_of(error)
    await context.abort(status.code, status.message, tuple(status.to_trailers()))
    raise AssertionError("abort raises")


def with_draining(handler: Handler, is_draining: Callable[[], bool]) -> Handler:
    """The health check, answering NOT_SERVING while the proxy drains or its node is about to stop."""

    async def check(request: Any, context: Any) -> bytes:
        if is_draining() or is_to_stop():
            return NOT_SERVING
        answer: bytes = await handler(request, context)
        return answer

    return check


async def _cancel(stream: AsyncIterator[Any]) -> None:
    """Cancel `stream` while it waits for its next message: Serve passes a cancellation on only then."""
    reading = _exhaust(stream)
    reader = asyncio.ensure_future(reading)
    try:
        await asyncio.sleep(0)
    except GeneratorExit:  # the event loop has ended
        reader.cancel()
        reading.close()
        raise
    except BaseException:
        await _ended(reader)  # a closing loop cancels this task, but not the new reader
        raise
    await _ended(reader)


async def _ended(reader: asyncio.Task[None]) -> None:
    reader.cancel()
    await asyncio.wait([reader])


async def _exhaust(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass
