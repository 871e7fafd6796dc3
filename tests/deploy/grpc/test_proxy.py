"""Serve's proxy and deploy.grpc.proxy handle a client that goes away."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import time
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse
from ray.serve._private.proxy import gRPCProxy
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deploy.api.proxy.admission import Places, ProxyAdmission
from deploy.files import STOP_FILE
from deploy.grpc.proxy import (
    _cancel,
    add_generation_service,
    add_health_service,
    admitted,
    one_message,
    refusing,
    take_bursts,
)
from deploy.grpc.proxy_deadline import with_deadline
from deploy.grpc.proxy_names import LastingContext
from deploy.grpc.status import DETAILS_KEY
from protos.outrider.v1 import generation_pb2 as pb

MOST = 1000
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Aborted(Exception):
    """gRPC's exception for an aborted call."""


class FakeContext:
    """A call: it may be asked for its peer only while it is alive."""

    is_alive = True

    def __init__(self, code=None, details="", trailers=()):
        self._code, self._details, self._trailers = code, details, trailers
        self.metadata = ()

    def peer(self):
        assert self.is_alive, "this would crash the process"
        return "ipv4:127.0.0.1:1"

    def code(self):
        return self._code

    def details(self):
        return self._details

    def invocation_metadata(self):
        return self.metadata

    def trailing_metadata(self):
        return self._trailers

    def set_code(self, code):
        self._code = code

    def set_details(self, details):
        self._details = details

    def set_trailing_metadata(self, trailers):
        self._trailers = tuple(trailers)

    async def abort(self, code, details, trailing_metadata=()):
        self.set_code(code)
        self._details, self._trailers = details, trailing_metadata
        raise Aborted

    def detail(self, kind):
        """The one google.rpc detail of the trailers."""
        status = status_pb2.Status.FromString(dict(self._trailers)[DETAILS_KEY])
        assert (status.code, status.message) == (self._code.value[0], self._details)
        detail = kind()
        assert any(packed.Unpack(detail) for packed in status.details)
        return detail


class FakeProxy:
    """A handler as Serve's: it tells the replica of a cancellation only while it waits, and asks for the peer last."""

    def __init__(self):
        self.is_cancelled = False

    async def stream(self, request, context):
        try:
            for number in range(request):
                yield number
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
        context.peer()


async def drop_after(stream, num_messages, context):
    """Read some messages, then forget the stream, as gRPC does when the client goes away while one is written."""
    for _ in range(num_messages):
        await anext(stream)
    context.is_alive = False
    del stream
    gc.collect()
    for _ in range(30):
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(handler, options=()):
    """The port of a server of gRPC with the one method /test/Call."""
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Call": handler}),))
    port = server.add_insecure_port("localhost:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def messages(*sent):
    for message in sent:
        yield message


def all_around(handler):
    """Wrap a handler like `add_generation_service`."""

    async def ask():
        return ()

    return admitted(refusing(handler), ProxyAdmission(ask), is_completion=True)


async def test_a_stream_that_is_dropped_between_messages_is_cancelled_at_the_replica():
    proxy, context = FakeProxy(), FakeContext()
    await drop_after(refusing(proxy.stream)(3, context), 2, context)
    assert proxy.is_cancelled


async def test_it_is_through_all_that_is_wrapped_around():
    proxy, context = FakeProxy(), FakeContext()
    await drop_after(all_around(proxy_of_bytes(proxy))(messages(b"abc"), context), 2, context)
    assert proxy.is_cancelled


# Names


def named(*metadata):
    context = FakeContext()
    context.metadata = (("x-request-id", "mine"), ("traceparent", TRACEPARENT), *metadata)
    return context


async def test_a_call_goes_to_serve_and_comes_back_with_its_name():
    seen = []

    async def handler(message, context):
        seen.extend(context.invocation_metadata())
        context.set_trailing_metadata([("of", "serve")])
        return message

    context = named(("authorization", "Bearer x"), ("request_id", "another"))
    assert await one_message(refusing(handler))(messages(b"abc"), context) == b"abc"
    assert dict(seen)["authorization"] == "Bearer x"
    assert sorted(seen)[1:] == [("request_id", "mine"), ("traceparent", TRACEPARENT), ("x-request-id", "mine")]
    assert context._trailers == (("of", "serve"), ("x-request-id", "mine"), ("traceparent", TRACEPARENT))


async def test_a_stream_comes_back_with_its_name_and_a_name_of_the_orchestrator_s_stays():
    async def handler(message, context):
        yield message
        context.set_trailing_metadata([("x-request-id", "the message's own")])

    context = named()
    stream = one_message(refusing(handler))(messages(b"abc"), context)
    assert [reply async for reply in stream] == [b"abc"]
    assert context._trailers == (("x-request-id", "the message's own"),)


@pytest.mark.parametrize("is_full", [True, False])
async def test_what_the_proxy_refuses_is_named_too(is_full):
    async def ask():
        return [Places(0 if is_full else 1, 0.5, 1, "pair")]

    async def handler(message, context):
        pytest.fail("it is refused before")

    admission, context = ProxyAdmission(ask), named()
    admission._refresh()
    await admission._asking
    with pytest.raises(Aborted):
        await admitted(handler, admission, is_completion=True)(messages(b"too long"), context)
    assert dict(context._trailers)["x-request-id"] == "mine"
    assert context.detail(error_details_pb2.RequestInfo).request_id == "mine"


async def test_the_name_that_a_message_brings_is_told_to_serve():
    seen = []

    async def handler(message, context):
        seen.append(dict(LastingContext(context).invocation_metadata())["request_id"])
        return message

    message = pb.GenerateRequest(request_id="its own").SerializeToString()
    await one_message(with_deadline(handler))(messages(message), named())
    assert seen == ["its own"]


async def test_the_message_of_a_stream_waits_until_its_first_piece_has_come():
    async def ask():
        return ()

    admission, proxy = ProxyAdmission(ask), FakeProxy()
    stream = admitted(proxy_of_bytes(proxy), admission, is_completion=True)(messages(b"abc"), FakeContext())
    assert await anext(stream) == 0
    assert admission._waiting_bytes == 0, "others may send theirs while this one goes on"
    await stream.aclose()


async def nobody():
    return ()


@pytest.mark.parametrize(
    "wrapped",
    [
        one_message,
        lambda handler: admitted(handler, ProxyAdmission(nobody), is_completion=True),
        lambda handler: one_message(with_deadline(handler)),
    ],
    ids=["one message", "admitted", "with_deadline"],
)
async def test_a_stream_that_is_left_has_closed_what_it_reads(wrapped):
    """And leaves it to no collector of garbage, which may come when the loop is closed."""
    closed = []

    async def handler(message, context):
        try:
            yield message
            yield message
        finally:
            closed.append(message)

    message = pb.GenerateRequest(timeout_s=60.0).SerializeToString()
    stream = wrapped(handler)(messages(message), named())
    assert await anext(stream) == message
    await stream.aclose()
    assert closed == [message]


async def test_a_call_goes_on_only_when_its_turn_has_come(monkeypatch):
    admission, seen = ProxyAdmission(nobody), []

    async def turn():
        seen.append("turn")

    async def handler(message, context):
        seen.append(message)
        return message

    monkeypatch.setattr(admission, "turn", turn)
    await admitted(handler, admission, is_completion=True)(messages(b"abc"), FakeContext())
    assert seen == ["turn", b"abc"]


def proxy_of_bytes(proxy):
    """The fake's stream for a message of bytes, of as many numbers as there are bytes."""

    async def stream(request, context):
        try:
            for number in range(len(request)):
                yield number
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            proxy.is_cancelled = True
        context.peer()

    return stream


async def test_no_task_is_left_behind_when_the_loop_ends_while_a_stream_is_dropped():
    """At a server's end `asyncio.run` cancels each task that it knows once, and closes the loop."""
    before = asyncio.all_tasks()
    stream = refusing(FakeProxy().stream)(3, FakeContext())
    assert await anext(stream) == 0
    dropping = asyncio.ensure_future(stream.aclose())
    await asyncio.sleep(0)  # it has asked for another message, which nobody has begun to wait for
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    assert asyncio.all_tasks() == before


async def test_serves_own_handler_does_not_do_that():
    """The reason for all this; when it fails, Ray has been mended and deploy.grpc.proxy can go."""
    proxy, context = FakeProxy(), FakeContext()
    await drop_after(proxy.stream(3, context), 2, context)
    assert not proxy.is_cancelled


@pytest.mark.filterwarnings("error")
async def test_a_stream_that_is_dropped_when_its_loop_has_ended_waits_for_nobody():
    """If a loop is closed with tasks that never ran to their end, Python closes their coroutines."""

    async def replies():
        yield b"never asked for"

    dropping = _cancel(replies())
    dropping.send(None)
    dropping.close()
    gc.collect()


async def test_a_stream_that_is_cancelled_while_it_waits_is_cancelled_as_before():
    proxy = FakeProxy()
    stream = refusing(proxy.stream)(1, FakeContext())
    assert await anext(stream) == 0
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
        await waiting
    assert proxy.is_cancelled


async def test_messages_and_the_rest_of_the_context_pass_through():
    async def handler(request, context):
        yield request
        yield context.code()

    assert [message async for message in refusing(handler)("first", FakeContext())] == ["first", None]
    assert LastingContext(FakeContext()).peer() == "ipv4:127.0.0.1:1"


# One message a call


async def echo(request, _context):
    return request


async def echo_stream(request, _context):
    yield request


async def exhaust(call):
    return [message async for message in call] if hasattr(call, "__anext__") else await call


@pytest.mark.parametrize("handler", [echo, echo_stream])
async def test_a_call_with_one_message_is_served(handler):
    assert await exhaust(one_message(handler)(messages(b"one"), FakeContext())) in (b"one", [b"one"])


@pytest.mark.parametrize("handler", [echo, echo_stream])
@pytest.mark.parametrize(("sent", "said"), [((), "got none"), ((b"one", b"two"), "got more"), ((b"", b""), "got more")])
async def test_a_call_with_more_or_none_is_refused_as_grpc_has_it(handler, sent, said):
    context = FakeContext()
    with pytest.raises(Aborted):
        await exhaust(one_message(handler)(messages(*sent), context))
    assert context.code() is grpc.StatusCode.UNIMPLEMENTED
    assert said in context.details()


# Overload


@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_there_is_no_place_for_is_refused_with_a_delay_and_asks_nobody(is_stream):
    async def ask():
        return [Places(1, 2.0, MOST, "pair")]

    num_asked = 0
    may_end = asyncio.Event()

    async def unary(request, context):
        nonlocal num_asked
        num_asked += 1
        await may_end.wait()
        return request

    async def stream(request, context):
        yield await unary(request, context)

    handler = admitted(stream if is_stream else unary, ProxyAdmission(ask), is_completion=True)
    first = asyncio.ensure_future(exhaust(handler(messages(b"x"), FakeContext())))
    while not num_asked:  # noqa: ASYNC110  the handler has no event
        await asyncio.sleep(0)
    context = FakeContext()
    with pytest.raises(Aborted):
        await exhaust(handler(messages(b"x"), context))
    assert context.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.detail(error_details_pb2.RetryInfo).retry_delay.seconds == 2
    may_end.set()
    await first
    await exhaust(handler(messages(b"x"), FakeContext()))
    assert num_asked == 2


async def test_a_stream_that_is_given_up_leaves_its_place_to_others():
    async def ask():
        return [Places(1, 2.0, MOST, "pair")]

    admission = ProxyAdmission(ask)
    handler = admitted(proxy_of_bytes(FakeProxy()), admission, is_completion=True)
    for _ in range(3):
        stream = handler(messages(b"ab"), FakeContext())
        assert await anext(stream) == 0
        await asyncio.sleep(0)
        await stream.aclose()


# Errors


@pytest.mark.parametrize("handler", [echo, echo_stream])
@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
async def test_an_error_of_serves_own_is_said_in_words_that_help(handler, code, caplog):
    context = FakeContext(code, "The actor died: OOM advice\nof a kilobyte", (("request_id", "r"),))
    await exhaust(refusing(handler)(b"x", context))
    assert context.code() is grpc.StatusCode.UNAVAILABLE
    assert "resume" in context.details()
    assert "actor" not in context.details()
    assert ("request_id", "r") in context.trailing_metadata()
    assert "The actor died: OOM advice" in caplog.text
    assert "kilobyte" not in caplog.text


async def test_an_error_of_serves_own_is_found_in_a_context_of_grpc_too():
    """Both that context and the fake one return the code that was set."""

    async def handler(message, context):
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details("The actor died")
        return message

    async with (
        serving(grpc.unary_unary_rpc_method_handler(refusing(handler))) as port,
        grpc.aio.insecure_channel(f"localhost:{port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/Call")(b"x")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "resume" in caught.value.details()


async def test_serves_own_refusal_gets_a_delay():
    context = FakeContext(grpc.StatusCode.RESOURCE_EXHAUSTED, "Request dropped due to backpressure")
    await refusing(echo)(b"x", context)
    assert context.detail(error_details_pb2.RetryInfo).retry_delay.seconds >= 1


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND])
async def test_an_error_of_ours_and_what_is_none_pass_as_they_are(code):
    ours = ((DETAILS_KEY, b""),) if code is grpc.StatusCode.INTERNAL else ()
    context = FakeContext(code, "as it was", ours)
    await refusing(echo)(b"x", context)
    assert (context.code(), context.details(), context.trailing_metadata()) == (code, "as it was", ours)


async def test_the_message_that_brings_a_streams_error_is_kept_back():
    async def stream(request, context):
        yield b"first"
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        yield b""

    assert await exhaust(refusing(stream)(b"x", FakeContext())) == [b"first"]


# How Serve is told of it


class FakeFactory:
    """Serves each method by saying its name; makes handlers of one message alone."""

    is_draining = False

    def __init__(self):
        self.proxy_router = object()

    def _is_draining(self):
        return self.is_draining

    def make(self, service_method, streaming_type):
        is_stream = {gRPCStreamingType.UNARY_UNARY: False, gRPCStreamingType.UNARY_STREAM: True}[streaming_type]

        async def unary(request, context):
            return service_method.encode()

        async def stream(request, context):
            yield service_method.encode()

        return stream if is_stream else unary


class FakeServer:
    """Asks for the handlers of all methods, as Serve's server does: of each for all kinds of streaming."""

    def __init__(self, proxy):
        self.service_handler_factory = proxy.make
        self.methods = {}
        self.handlers = {}

    def add_generic_rpc_handlers(self, handlers):
        for handler in handlers:
            self.methods |= handler._method_handlers

    def add_registered_method_handlers(self, service, methods):
        for name, method in methods.items():
            assert method == self.methods[f"/{service}/{name}"]
            kind = gRPCStreamingType.STREAM_STREAM if method.response_streaming else gRPCStreamingType.STREAM_UNARY
            self.handlers[name] = self.service_handler_factory(service_method=f"/{service}/{name}", streaming_type=kind)


@pytest.fixture
def proxy():
    return FakeFactory()


@pytest.fixture
def server(proxy):
    server = FakeServer(proxy)
    add_health_service(_AnyServicer(), server)
    return server


@pytest.mark.parametrize("add", [add_generation_service, add_health_service])
def test_every_method_takes_a_stream_of_bytes_and_the_server_is_left_as_it_was(add, proxy):
    server = FakeServer(proxy)
    add(_AnyServicer(), server)
    assert server.methods
    for method in server.methods.values():
        assert method.request_streaming
        assert method.request_deserializer is None
    assert server.service_handler_factory == proxy.make


async def test_the_methods_are_those_of_the_service(proxy):
    server = FakeServer(proxy)
    proxy.proxy_router = None
    add_generation_service(_AnyServicer(), server)
    context = FakeContext()
    info = await server.handlers["GetModelInfo"](messages(b""), context)
    assert info == b"/outrider.v1.GenerationService/GetModelInfo"


APPLICATION_S = b"/grpc.health.v1.Health/Check"


async def says_not_serving(check):
    return (
        HealthCheckResponse.FromString(await check(messages(b""), FakeContext())).status
        == HealthCheckResponse.NOT_SERVING
    )


async def test_a_proxy_that_drains_says_not_serving_and_asks_nobody(proxy, server):
    assert server.service_handler_factory == proxy.make
    check, listed = server.handlers["Check"], server.handlers["List"]
    assert await check(messages(b""), FakeContext()) == APPLICATION_S
    proxy.is_draining = True
    assert await says_not_serving(check)
    assert await listed(messages(b""), FakeContext()) == b"/grpc.health.v1.Health/List"
    proxy.is_draining = False
    assert await check(messages(b""), FakeContext()) == APPLICATION_S


async def test_a_file_that_was_left_since_the_proxy_began_says_that_its_node_is_to_stop(server, monkeypatch, tmp_path):
    check, stop_file = server.handlers["Check"], tmp_path / "is-to-stop"
    monkeypatch.setenv(STOP_FILE, str(stop_file))
    assert await check(messages(b""), FakeContext()) == APPLICATION_S
    stop_file.touch()
    os.utime(stop_file, (0, 0))  # left by an earlier life of the container
    assert await check(messages(b""), FakeContext()) == APPLICATION_S
    os.utime(stop_file)
    assert await says_not_serving(check)


def test_serve_s_proxy_is_what_makes_handlers_and_knows_whether_it_drains():
    """`add_health_service` relies on this; if Ray changes it, this test says so before a cluster does."""
    assert callable(gRPCProxy._is_draining)
    assert inspect.isfunction(gRPCProxy.service_handler_factory)


class _AnyServicer:
    def __getattr__(self, name):
        return None


@pytest.mark.thorough
async def test_a_burst_that_grpc_would_cancel_by_itself_is_taken_in(monkeypatch):
    """With the options that `take_bursts` adds; without them gRPC begins to cancel at a thousand that wait."""
    options = []
    monkeypatch.setattr("deploy.grpc.proxy.DEFAULT_GRPC_SERVER_OPTIONS", options)
    take_bursts()

    def are_sent(calls):
        return len(calls) == NUM_BURST

    def is_one_cancelled(calls):
        return any(call.done() for call in calls)

    codes = {"prepared": await burst(options, are_sent), "not prepared": await burst([], is_one_cancelled)}
    assert codes["prepared"] == {grpc.StatusCode.RESOURCE_EXHAUSTED: NUM_BURST}
    assert codes["not prepared"][grpc.StatusCode.CANCELLED] > 0


NUM_BURST = 2_560
PATIENT = ("grpc.server.max_unrequested_time_in_server", 600)
"""Seconds: on a busy machine calls may wait for longer than the 30 after which gRPC cancels them, too."""


async def burst(options, is_over):
    """Codes of calls that arrive while the server is held up, until `is_over(calls)`."""
    is_held, calls = True, []

    async def refuse(_messages, context):
        nonlocal is_held
        if is_held:
            is_held = False
            while not is_over(calls):
                time.sleep(0.5)  # noqa: ASYNC251  as what a call costs on its way into Serve does
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    def call_all(port):
        with grpc.insecure_channel(f"localhost:{port}") as channel:
            method = channel.unary_unary("/test/Call")
            for _ in range(NUM_BURST):
                calls.append(method.future(b"x"))
            return Counter(call.code() for call in calls)

    async with serving(grpc.stream_unary_rpc_method_handler(refuse), [*options, PATIENT]) as port:
        return await asyncio.to_thread(call_all, port)
