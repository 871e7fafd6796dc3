"""The layer in Serve's HTTP proxy, with Serve's parts replaced by the test's."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvicorn
from ray.serve._private.http_util import RequestIdMiddleware, _apply_middlewares
from ray.serve._private.proxy import HTTPProxy

from core.errors import Unavailable
from deploy.api.proxy import admission as proxy_admission
from deploy.api.proxy.admission import Places, ProxyAdmission
from deploy.calls import CallId
from deploy.files import STOP_FILE
from deploy.http import proxy as module
from deploy.http.connections import Connection
from deploy.http.proxy import MAX_BODY_BYTES, HttpProxy
from deploy.http.wire import EVENTS, Call, Head
from deploy.proxy import prepare

PATH = "/v1/completions"


class FakeServe:
    """Serve's HTTP server, its proxy, its router and a handle, all in one."""

    is_draining = False
    num_ongoing = 0
    has_application = True

    def __init__(self, *parts, waits=False):
        self.parts = parts
        self.waits = waits
        self.calls = []
        self.was_cancelled = False
        self.num_passed_on = 0

    @property
    def _app(self):
        return self

    proxy_router = _app

    async def __call__(self, scope, receive, send):
        self.num_passed_on += 1

    def _is_draining(self):
        return self.is_draining

    def _ongoing_requests_start(self):
        self.num_ongoing += 1

    def _ongoing_requests_end(self):
        self.num_ongoing -= 1

    def get_handle_for_endpoint(self, name):
        return ("/", self, False) if self.has_application else None

    def options(self, **options):
        assert options == {"stream": True, "method_name": "http"}
        return self

    def remote(self, call):
        assert isinstance(call, Call)
        self.calls.append(call)
        return self

    async def replies(self, disconnected_task):
        """A stream like that of Serve's ProxyResponseGenerator, which learns by a cancellation that the client has
        gone."""
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part
        if self.waits:
            await asyncio.wait([disconnected_task])
            self.was_cancelled = True
            raise asyncio.CancelledError


class Client:
    """One request, sent in pieces, and what comes back; it goes away when it is told to."""

    def __init__(self, *pieces, path=PATH, method="POST", headers=()):
        pieces = pieces or (b"{}",)
        self.scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        self.messages = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        self.gone = asyncio.Event()
        self.head = None
        self.body = b""
        self.is_complete = False
        self.has_begun = asyncio.Event()

    async def receive(self):
        if self.messages:
            return self.messages.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.head = message
        else:
            self.body += message["body"]
            self.has_begun.set()
            self.is_complete = not message["more_body"]

    @property
    def headers(self):
        return dict(self.head["headers"])

    @property
    def error(self):
        assert self.is_complete
        return self.head["status"], json.loads(self.body)["error"]


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(
        module, "ProxyResponseGenerator", lambda handle, disconnected_task: handle.replies(disconnected_task)
    )

    def make(serve, places=4):
        async def ask():
            return [Places(places, 0.5, 1000, "pair")]

        admission = ProxyAdmission(ask)
        monkeypatch.setattr(module, "admission_behind", lambda router: admission)
        return HttpProxy(serve)

    return make


async def ask(layer, client):
    await asyncio.wait_for(layer(client.scope, client.receive, client.send), 10)
    return client


async def test_a_call_is_passed_on_whole_and_its_reply_in_pieces(layer):
    serve = FakeServe(Head(200, EVENTS), b"one", b"two")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = [(b"Authorization", b"Bearer t"), (b"X-Request-Id", b"mine"), (b"traceparent", trace.encode())]
    client = await ask(layer(serve), Client(b'{"a"', b":1}", headers=headers))
    assert serve.calls == [Call("POST", PATH, "Bearer t", CallId("mine", trace), b'{"a":1}')]
    assert client.headers[b"traceparent"] == trace.encode()
    assert (client.head["status"], client.body, client.is_complete) == (200, b"onetwo", True)
    assert client.headers[b"x-request-id"] == b"mine"
    assert serve.num_ongoing == 0


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"\xff", b"a\x00"])
async def test_a_request_id_that_is_not_fit_is_replaced(layer, given):
    client = await ask(layer(FakeServe(Head(200))), Client(headers=[(b"x-request-id", given)]))
    assert len(client.headers[b"x-request-id"]) == 32


async def test_a_key_comes_as_anthropic_s_clients_send_it_and_errors_go_as_they_read_them(layer):
    serve = FakeServe(Head(200), b"", Unavailable("lost"))
    client = Client(path="/v1/messages", headers=[(b"x-api-key", b"t")])
    await ask(layer(serve), client)
    assert serve.calls[0].authorization == "Bearer t"
    name, data = client.body.decode().strip().split("\n")
    content = json.loads(data.removeprefix("data: "))
    assert (name, content["type"], content["error"]["type"]) == ("event: error", "error", "overloaded_error")
    refused = await ask(layer(FakeServe()), Client(path="/v1/messages", headers=[(b"content-length", b"1" * 12)]))
    assert (refused.error[0], refused.error[1]["type"]) == (413, "request_too_large")


async def test_serve_s_own_paths_stay_serve_s(layer):
    serve = FakeServe()
    await ask(layer(serve), Client(path="/-/healthz", method="GET"))
    assert (serve.num_passed_on, serve.calls) == (1, [])


async def test_what_only_looks_like_serve_s_own_is_answered_here_and_sockets_are_closed(layer):
    serve = FakeServe(Head(200))
    await ask(layer(serve), Client(path="/-/anything/v1/completions"))
    assert (serve.num_passed_on, len(serve.calls)) == (0, 1)
    client, sent = Client(), []
    client.scope["type"] = "websocket"

    async def send(message):
        sent.append(message["type"])

    await layer(serve)(client.scope, client.receive, send)
    assert (sent, serve.num_passed_on) == (["websocket.close"], 0)


async def test_bodies_that_never_end_are_bounded_in_sum_and_in_time(layer, monkeypatch):
    monkeypatch.setattr(proxy_admission, "MAX_WAITING_BYTES", 3 * 2**20)
    serve = FakeServe(Head(200))
    asked, half_sent = layer(serve), []
    for _ in range(3):
        client = Client(b"x" * 2**20, b"")
        client.messages.pop()
        half_sent.append(client)
    reading = [asyncio.create_task(ask(asked, client)) for client in half_sent]
    await asyncio.sleep(0)
    assert (await ask(asked, Client(b"x"))).error[0] == 429
    for client in half_sent:
        client.gone.set()
    await asyncio.gather(*reading)
    assert len((await ask(asked, Client(b"x"))).body) == len(serve.calls) - 1 == 0
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.01)
    late = Client(b"x", b"")
    late.messages.pop()
    assert (await ask(asked, late)).error[0] == 504


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_is_bounded_as_it_is_read(layer, is_announced):
    serve = FakeServe(Head(200))
    headers = [(b"content-length", str(MAX_BODY_BYTES + 1).encode())] if is_announced else []
    pieces = [b"x" * 2**20] * 20
    client = await ask(layer(serve), Client(*pieces, headers=headers))
    assert client.error[0] == 413
    assert serve.calls == []
    assert len(client.messages) == (20 if is_announced else 20 - 9)


@pytest.mark.parametrize(("encoding", "status"), [(b"gzip", 415), (b"br, gzip", 415), (b"Identity", 200)])
async def test_a_body_that_is_compressed_is_refused_as_such(layer, encoding, status):
    serve = FakeServe(Head(200), b"{}")
    client = await ask(layer(serve), Client(headers=[(b"content-encoding", encoding)]))
    assert client.head["status"] == status
    assert len(serve.calls) == (status == 200)
    assert status == 200 or json.loads(client.body)["error"]["param"] == "content-encoding"


async def test_a_client_that_goes_away_has_its_call_cancelled(layer):
    serve = FakeServe(Head(200, EVENTS), b"one", waits=True)
    client = Client()
    asking = asyncio.create_task(ask(layer(serve), client))
    await client.has_begun.wait()
    assert serve.num_ongoing == 1
    client.gone.set()
    await asking
    assert (serve.was_cancelled, serve.num_ongoing) == (True, 0)


async def test_nothing_is_asked_for_while_a_slow_client_is_written_to(layer):
    serve, client = FakeServe(Head(200, EVENTS), b"one", b"two"), Client()
    may_go_on = asyncio.Event()

    async def send(message):
        await client.send(message)
        if message.get("body") == b"one":
            await may_go_on.wait()

    asking = asyncio.create_task(layer(serve)(client.scope, client.receive, send))
    await client.has_begun.wait()
    await asyncio.sleep(0.01)
    assert client.body == b"one"
    may_go_on.set()
    await asking
    assert client.body == b"onetwo"


async def test_a_lost_orchestrator_is_told_in_a_line(layer):
    client = await ask(layer(FakeServe(RuntimeError("Traceback: secret"))), Client())
    status, error = client.error
    assert (status, error["type"]) == (503, "server_error")
    assert "secret" not in error["message"]


async def test_an_orchestrator_that_is_lost_before_its_first_bytes_has_a_status_of_its_own(layer):
    status, error = (await ask(layer(FakeServe(Head(200), RuntimeError("x"))), Client())).error
    assert (status, error["type"]) == (503, "server_error")


async def test_an_orchestrator_that_is_lost_in_a_stream_ends_it_with_an_event(layer):
    client = await ask(layer(FakeServe(Head(200, EVENTS), b"data: 1\n\n", RuntimeError("x"))), Client())
    assert client.is_complete
    assert json.loads(client.body.decode().split("data: ")[2])["error"]["type"] == "server_error"


async def test_a_service_that_is_not_there_yet_is_503(layer):
    serve = FakeServe()
    serve.has_application = False
    assert (await ask(layer(serve), Client())).error[0] == 503


async def test_what_has_no_place_is_refused_without_asking(layer):
    serve = FakeServe(Head(200), waits=True)
    full = layer(serve, places=0)
    first = Client()
    first.gone.set()
    await ask(full, first)  # the proxy learns of the places meanwhile
    num_calls = len(serve.calls)
    client = await ask(full, Client())
    assert client.error[0] == 429
    assert client.headers[b"retry-after-ms"] == b"500"
    assert len(serve.calls) == num_calls


async def test_health_says_when_the_node_is_to_stop(layer, monkeypatch, tmp_path):
    serve = FakeServe(Head(200), b"{}")
    http = layer(serve)
    assert (await ask(http, Client(path="/health", method="GET"))).head["status"] == 200
    serve.is_draining = True
    assert (await ask(http, Client(path="/health", method="GET"))).error[0] == 503
    serve.is_draining = False
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    (tmp_path / "stop").touch()
    assert (await ask(http, Client(path="/health", method="GET"))).error[0] == 503


def test_serve_s_parts_are_where_they_are_looked_for(monkeypatch):
    """The layer relies on this; if Ray changes it, this test says so before a cluster does."""
    monkeypatch.setattr("deploy.grpc.proxy.DEFAULT_GRPC_SERVER_OPTIONS", [])
    monkeypatch.setattr("uvicorn.config.HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    serve = FakeServe()
    layer = _apply_middlewares(serve, prepare())
    assert isinstance(layer, HttpProxy)
    assert isinstance(layer._app, RequestIdMiddleware)
    assert layer._proxy is serve
    for name in ("_is_draining", "_ongoing_requests_start", "_ongoing_requests_end"):
        assert callable(getattr(HTTPProxy, name))
    config = uvicorn.Config(layer)
    config.load()
    assert config.http_protocol_class is Connection
