"""TLS, HTTP/2, gRPC and server-sent events through nginx, by the configuration in docs/howto; skipped without nginx."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.clients.tls import certificate
from tests.deploy.grpc.rpc import Script, greeting, server

NGINX = shutil.which("nginx")
CONFIG = Path(__file__).parents[2] / "docs" / "howto" / "nginx.conf"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx"),
]
KEEPALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0)]


class Slow(Script):
    """Says nothing for a while between its pieces."""

    def __init__(self, silence_s):
        super().__init__(*greeting())
        self.silence_s = silence_s

    async def generate(self, request):
        async for chunk in super().generate(request):
            yield chunk
            await asyncio.sleep(self.silence_s)


class Events(http.server.BaseHTTPRequestHandler):
    """Two events with a silence between, as an orchestrator streams them."""

    protocol_version = "HTTP/1.1"
    silence_s = 0.0

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in (b"data: one\n\n", b"data: [DONE]\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            time.sleep(type(self).silence_s)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def proxied(folder, script, **changes):
    """The port of nginx before a real servicer and a source of events, and its certificate; `changes` of directives."""
    handler = type("Handler", (Events,), {"silence_s": getattr(script, "silence_s", 0.0)})
    with server(script) as grpc_address, http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as events:
        threading.Thread(target=events.serve_forever, daemon=True).start()
        pem, key = certificate("localhost")
        (folder / "tls.crt").write_bytes(pem)
        (folder / "tls.key").write_bytes(key)
        port = free_port()
        text = written(folder, port, grpc_address.replace("localhost", "[::1]"), events.server_address[1], changes)
        (folder / "nginx.conf").write_text(text)
        process = subprocess.Popen([NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "errors"])
        try:
            wait_for(port)
            yield port, pem
        finally:
            process.terminate()
            process.wait(10)
            events.shutdown()


def written(folder, port, grpc_address, http_port, changes):
    """The configuration for this machine: ports and folders are others, and there is no user to change to."""
    text = CONFIG.read_text().replace("/etc/outrider", str(folder)).replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("127.0.0.1:9000", grpc_address).replace("127.0.0.1:8000", f"127.0.0.1:{http_port}")
    for name, value in changes.items():
        text, num = re.subn(rf"{name} [^;]+;", f"{name} {value};", text)
        assert num, f"{name} is not in {CONFIG.name}"
    paths = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    return f"daemon off; pid {folder}/pid;\n" + text.replace("\nhttp {", f"\nhttp {{ access_log off; {paths}")


def wait_for(port):
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("nginx does not listen")


@contextmanager
def stub(port, pem):
    credentials = grpc.ssl_channel_credentials(pem)
    with grpc.secure_channel(f"localhost:{port}", credentials, KEEPALIVE) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def post(port, pem, body=b"{}", path="/v1/completions"):
    """A call by HTTPS; the reply's status, and its lines with the time of each."""
    connection = http.client.HTTPSConnection(
        "localhost", port, context=ssl.create_default_context(cadata=pem.decode()), timeout=120
    )
    try:
        connection.request("POST", path, body)
        reply = connection.getresponse()
        return reply.status, [(line.strip(), time.monotonic()) for line in reply]
    finally:
        connection.close()


def test_pieces_come_through_as_they_are_said_by_grpc_and_as_events(tmp_path):
    with proxied(tmp_path, Slow(0.5)) as (port, pem):
        with stub(port, pem) as service:
            stream = service.GenerateStream(pb.GenerateRequest(text="say"))
            first, began_s = next(stream), time.monotonic()
            second = next(stream)
            assert (first.text, second.text) == ("hello", " word")
            assert time.monotonic() - began_s > 0.2, "the first is not kept back until the second"
            assert service.Generate(pb.GenerateRequest(text="say")).text == "hello word"
        status, lines = post(port, pem)
        said = [(line, at_s) for line, at_s in lines if line]
        assert (status, [line for line, _ in said]) == (200, [b"data: one", b"data: [DONE]"])
        assert said[1][1] - said[0][1] > 0.2


def test_the_connection_speaks_http_2_and_no_old_tls(tmp_path):
    with proxied(tmp_path, Script(*greeting())) as (port, pem):
        context = ssl.create_default_context(cadata=pem.decode())
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("localhost", port))
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            assert (secure.selected_alpn_protocol(), secure.version()) == ("h2", "TLSv1.3")


def test_errors_keep_their_status_through_the_proxy(tmp_path):
    with proxied(tmp_path, Script(*greeting())) as (port, pem), stub(port, pem) as service:
        with pytest.raises(grpc.RpcError) as caught:
            service.Generate(pb.GenerateRequest(text="say", n=1000))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n: must be in" in caught.value.details()
        assert post(port, pem, b"x" * (9 * 2**20))[0] == 413


def test_the_timeouts_that_the_file_sets_are_those_that_cut_streams(tmp_path):
    """With a second in their place, a silence of three ends both."""
    changes = {"grpc_read_timeout": "1s", "proxy_read_timeout": "1s"}
    with proxied(tmp_path, Slow(3.0), **changes) as (port, pem), stub(port, pem) as service:
        with pytest.raises(grpc.RpcError):
            list(service.GenerateStream(pb.GenerateRequest(text="say")))
        assert [line for line, _ in post(port, pem)[1] if line] == [b"data: one"]


@pytest.mark.slow
def test_a_stream_that_is_silent_for_more_than_a_minute_goes_on(tmp_path):
    with proxied(tmp_path, Slow(65.0)) as (port, pem), stub(port, pem) as service:
        chunks = list(service.GenerateStream(pb.GenerateRequest(text="say")))
        assert [chunk.text for chunk in chunks] == ["hello", " word"]
        assert [line for line, _ in post(port, pem)[1] if line] == [b"data: one", b"data: [DONE]"]
