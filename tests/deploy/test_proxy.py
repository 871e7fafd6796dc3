"""What Serve's proxy makes of a client that goes away, and what deploy.proxy makes of that."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from ray.serve._private.proxy import gRPCProxy

from deploy.proxy import STOP_FILE, LastingContext, add_generation_service, add_health_service, attentive


class FakeContext:
    """A call: it may be asked for its peer only while it is alive."""

    is_alive = True

    def peer(self):
        assert self.is_alive, "this would crash the process"
        return "ipv4:127.0.0.1:1"

    def code(self):
        return 0


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
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_stream_that_is_dropped_between_messages_is_cancelled_at_the_replica():
    proxy, context = FakeProxy(), FakeContext()
    await drop_after(attentive(proxy.stream)(3, context), 2, context)
    assert proxy.is_cancelled


async def test_serves_own_handler_does_not_do_that():
    """The reason for all this; when it fails, Ray has been mended and deploy.proxy can go."""
    proxy, context = FakeProxy(), FakeContext()
    await drop_after(proxy.stream(3, context), 2, context)
    assert not proxy.is_cancelled


async def test_a_stream_that_is_cancelled_while_it_waits_is_cancelled_as_before():
    proxy = FakeProxy()
    stream = attentive(proxy.stream)(1, FakeContext())
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

    assert [message async for message in attentive(handler)("first", FakeContext())] == ["first", 0]
    assert LastingContext(FakeContext()).peer() == "ipv4:127.0.0.1:1"


def test_only_streams_are_changed_and_the_server_is_left_as_it_was():
    class FakeServer:
        def __init__(self):
            self.service_handler_factory = self.make
            self.handlers = {}

        def make(self, name):
            return self.stream if "Stream" in name else self.unary

        async def stream(self, request, context):
            yield request

        async def unary(self, request, context):
            return request

        def add_generic_rpc_handlers(self, handlers):
            pass

        def add_registered_method_handlers(self, service, methods):
            self.handlers = {name: self.service_handler_factory(name=name) for name in methods}

    server = FakeServer()
    add_generation_service(_AnyServicer(), server)
    assert server.handlers["Generate"] == server.unary
    assert server.handlers["GenerateStream"] != server.stream
    assert server.service_handler_factory == server.make


class FakeFactory:
    """Serves each method by saying its name."""

    is_draining = False

    def _is_draining(self):
        return self.is_draining

    def make(self, service_method, streaming_type):
        async def unary(request, context):
            return service_method.encode()

        async def stream(request, context):
            yield service_method.encode()

        return stream if streaming_type.endswith("STREAM") else unary


class FakeHealthServer:
    """Asks for the handlers of all methods, as gRPC's generated code makes a server do."""

    def __init__(self, proxy):
        self.service_handler_factory = proxy.make
        self.handlers = {}

    def add_generic_rpc_handlers(self, handlers):
        pass

    def add_registered_method_handlers(self, service, methods):
        for name in methods:
            for kind in ("UNARY", "STREAM"):
                method = f"/{service}/{name}"
                self.handlers[name, kind] = self.service_handler_factory(service_method=method, streaming_type=kind)


@pytest.fixture
def proxy():
    return FakeFactory()


@pytest.fixture
def server(proxy):
    server = FakeHealthServer(proxy)
    add_health_service(_AnyServicer(), server)
    return server


APPLICATION_S = b"/grpc.health.v1.Health/Check"


async def says_not_serving(check):
    return HealthCheckResponse.FromString(await check(None, None)).status == HealthCheckResponse.NOT_SERVING


async def test_a_proxy_that_drains_says_not_serving_and_asks_nobody(proxy, server):
    assert server.service_handler_factory == proxy.make
    check, listed = server.handlers["Check", "UNARY"], server.handlers["List", "UNARY"]
    assert await check(None, None) == APPLICATION_S
    proxy.is_draining = True
    assert await says_not_serving(check)
    assert await listed(None, None) == b"/grpc.health.v1.Health/List"
    proxy.is_draining = False
    assert await check(None, None) == APPLICATION_S


async def test_a_file_that_was_left_since_the_proxy_began_says_that_its_node_is_to_stop(server, monkeypatch, tmp_path):
    check, stop_file = server.handlers["Check", "UNARY"], tmp_path / "is-to-stop"
    monkeypatch.setenv(STOP_FILE, str(stop_file))
    assert await check(None, None) == APPLICATION_S
    stop_file.touch()
    os.utime(stop_file, (0, 0))  # left by an earlier life of the container
    assert await check(None, None) == APPLICATION_S
    os.utime(stop_file)
    assert await says_not_serving(check)


def test_serve_s_proxy_is_what_makes_handlers_and_knows_whether_it_drains():
    """What `add_health_service` rests on; should Ray change it, this says so before a cluster does."""
    assert callable(gRPCProxy._is_draining)
    assert inspect.isfunction(gRPCProxy.service_handler_factory)


class _AnyServicer:
    def __getattr__(self, name):
        return None
