"""Replies on real sockets: their length, HTTP/1.0, and clients that close their side."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager

import pytest
import uvicorn

from deploy.http.connections import PROBE, Connection
from deploy.http.wire import whole

WHOLE = b'{"a":1}'


LATE_S = {"/late": 1.2, "/too-late": 60.0}


class App:
    """ASGI: one reply at once or after a time, or a stream; it says when it is cancelled."""

    def __init__(self):
        self.was_gone = threading.Event()

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        path = scope["path"]
        if path in LATE_S:
            gone = asyncio.create_task(self._until_gone(receive))
            await asyncio.wait([gone], timeout=LATE_S[path])
            if gone.done():
                self.was_gone.set()
                return
            gone.cancel()
        headers = whole(WHOLE)[0].headers if path != "/stream" else (("content-type", "text/event-stream"),)
        pairs = [(name.encode(), value.encode()) for name, value in headers]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        pieces = [WHOLE] if path != "/stream" else [b"data: 1\n\n", b"data: 2\n\n"]
        for piece in pieces:
            await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _until_gone(receive):
        while (await receive())["type"] != "http.disconnect":
            pass


@contextmanager
def serving(loop):
    app = App()
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http=Connection, loop=loop, ws="none", lifespan="off", log_level="critical")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield app, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def served(request):
    with serving(request.param) as found:
        yield found


def answer(port, *pieces, closes=True):
    """Everything that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if closes:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while data := connection.recv(65536):
            found += data
    return found


def request(path, version="1.1", body=b""):
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"GET {path} HTTP/{version}\r\nhost: x\r\n{length}\r\n".encode() + body


@pytest.mark.parametrize("path", ["/", "/late", "/stream"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_has_closed_its_side_gets_its_reply(served, path, version):
    found = answer(served[1], request(path, version, b"body"))
    while found.startswith(PROBE):
        found = found.removeprefix(PROBE)
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"chunked" in head) == (path == "/stream" and version == "1.1")
    assert body == WHOLE or body.count(b"data: ") == 2
    assert (f"content-length: {len(WHOLE)}".encode() in head) == (path != "/stream")


@pytest.mark.parametrize("path", ["/", "/stream"])
def test_http_1_0_gets_no_chunks(served, path):
    """nginx asks with HTTP/1.0 by default. Its first line may come in pieces."""
    data = request(path, "1.0")
    found = answer(served[1], data[:7], data[7:], closes=False)
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == (WHOLE if path == "/" else b"data: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize("has_closed_before", [False, True])
def test_a_client_that_has_gone_is_noticed_before_there_is_a_reply(served, has_closed_before):
    app, port = served
    app.was_gone.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request("/too-late"))
        if has_closed_before:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(10)
    assert app.was_gone.wait(LATE_S["/too-late"] / 2)


def test_a_request_that_is_cut_off_is_not_answered(served):
    assert answer(served[1], b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf") == b""
    assert answer(served[1], b"GET / HTT") == b""


def test_a_connection_stays_open_for_the_next_request(served):
    with socket.create_connection(("127.0.0.1", served[1]), timeout=60) as connection:
        for _ in range(3):
            connection.sendall(request("/"))
            found = b""
            while not found.endswith(WHOLE):
                found += connection.recv(65536)
            assert found.count(b"HTTP/1.1 200") == 1
        connection.sendall(request("/") * 2)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while data := connection.recv(65536):
            found += data
        assert found.replace(PROBE, b"").count(WHOLE) == 2
