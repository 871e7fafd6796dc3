"""The engine's end of `bench.service.streams`: a process that waits instead of computing, and talks in one of the ways.

Its thread works like an engine's: it takes requests between passes, and sends new nodes after each pass.
"""

from __future__ import annotations

import asyncio
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import grpc
import grpc.aio
import uvloop

from core.records import DraftRequest, DraftUpdate, Timing, Verdict, VerifyRequest
from core.speculation import ROOT, NewNodes
from deploy.link.address import LinkAddress
from deploy.link.handshake import admit, challenge
from deploy.link.replies import encode_replies
from deploy.link.requests import decode_requests
from deploy.link.server import LinkServer
from deploy.link.stream import MAX_FRAME_BYTES, FrameReader, framed, parse
from protos.outrider.link.v1 import link_pb2 as pb

LINK, GRPC, ONE_THREAD = "link", "grpc.aio", "link, one thread"
METHOD = "/outrider.bench.Engine/Talk"
PASS_S = 0.001
PASSES = 5
"""Number of passes per verification, with growth after each."""
NUM_GROWN = 95
"""Number of nodes per pass, the average of the 0.5B draft in recorded rounds."""
KEY = b"k" * 32
Numbered = Sequence[tuple[int, Any]]


class Answer(Protocol):
    """Receiver of replies."""

    def take(self, replies: Numbered) -> None: ...


class Engine:
    """Waits for the duration of its passes instead of computing them."""

    def __init__(self) -> None:
        self._growing: tuple[int, DraftRequest] | None = None
        self._verifying: tuple[int, VerifyRequest] | None = None
        self._num_left = self._num_told = 0

    @property
    def has_work(self) -> bool:
        return self._verifying is not None

    def add(self, batch: Numbered) -> None:
        for number, request in batch:
            if isinstance(request, DraftRequest):
                self._growing = number, request
            else:
                self._verifying, self._num_left = (number, request), PASSES

    def step(self) -> list[tuple[int, Any]]:
        """Run one pass, and return the replies that it completes."""
        time.sleep(PASS_S)
        self._num_left -= 1
        replies: list[tuple[int, Any]] = []
        if self._growing is not None:
            number, request = self._growing
            replies.append((number, DraftUpdate(request.stamp, self._grown(), 200, Timing(0.0, PASS_S, 1, 64))))
        if self._num_left == 0 and self._verifying is not None:
            number, verified = self._verifying
            replies.append((number, Verdict(verified.stamp, (0, 1, 2), 7, 200, timing=Timing(0.0, 0.005, 1, 9))))
            self._verifying = None
        return replies

    def _grown(self) -> NewNodes:
        first, self._num_told = self._num_told, self._num_told + NUM_GROWN
        places = range(NUM_GROWN)
        parents = [ROOT if first == 0 else first - 1 - place // 2 for place in places]
        return NewNodes(
            first, parents, list(places), [0] * NUM_GROWN, [0.5] * NUM_GROWN, [0.5] * NUM_GROWN, is_own=True
        )


def serve(way: str, parent: Connection) -> None:
    """Serve until this process is killed. Each message from `parent` is answered with the processor time so far."""
    if way == ONE_THREAD:
        threading.Thread(target=_talk_alone, args=(parent,), daemon=True).start()
        _tell_cpu(parent)
    uvloop.run(_serve(way, parent))


def _tell_cpu(parent: Connection) -> None:
    while True:
        parent.recv()
        parent.send(time.process_time())


async def _serve(way: str, parent: Connection) -> None:
    orders: queue.SimpleQueue[tuple[Numbered, Answer]] = queue.SimpleQueue()
    threading.Thread(target=_compute, args=(orders,), daemon=True).start()

    def post(batch: Numbered, answer: Answer) -> None:
        orders.put((batch, answer))

    if way == LINK:
        server = LinkServer(1, (VerifyRequest, DraftRequest), post)
        parent.send(await server.start("127.0.0.1", (20300, 20399)))
    else:
        parent.send(await _serve_grpc(post))
    threading.Thread(target=_tell_cpu, args=(parent,), daemon=True).start()
    await asyncio.Event().wait()


def _compute(orders: queue.SimpleQueue[tuple[Numbered, Answer]]) -> None:
    """The engine's thread, like `workers.engine.thread.EngineLoop`."""
    engine = Engine()
    while True:
        try:
            batch, answer = orders.get(block=not engine.has_work)
            engine.add(batch)
        except queue.Empty:
            answer.take(engine.step())


# grpc.aio


async def _serve_grpc(post: Callable[[Numbered, Answer], None]) -> int:
    async def talk(requests: Any, context: Any) -> None:
        answer = _Written(asyncio.get_running_loop(), asyncio.Queue())
        writing = asyncio.create_task(answer.write_to(context))
        async for frame in requests:
            post(decode_requests(frame), answer)
        writing.cancel()

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(talk)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.bench.Engine", {"Talk": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _kept.append(server)
    return port


_kept: list[Any] = []
"""Keeps the server alive, which ends with the last reference to it."""


class _Written:
    """Sends replies from the event loop: no other thread can write to a gRPC stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, frames: asyncio.Queue[bytes]) -> None:
        self._loop = loop
        self._frames = frames

    def take(self, replies: Numbered) -> None:
        frame = encode_replies(replies)
        self._loop.call_soon_threadsafe(self._frames.put_nowait, frame)

    async def write_to(self, context: Any) -> None:
        """Write frames until cancelled."""
        while True:
            await context.write(await self._frames.get())


# One thread


def _talk_alone(parent: Connection) -> None:
    """Compute, read and write in one thread: the connection is served between passes, and waited for without work."""
    listener = socket.create_server(("127.0.0.1", 0))
    parent.send(LinkAddress("127.0.0.1", listener.getsockname()[1], 1, KEY))
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = FrameReader(MAX_FRAME_BYTES)
    _shake_hands(connection, reader)
    connection.setblocking(False)
    engine, ready = Engine(), selectors.DefaultSelector()
    ready.register(connection, selectors.EVENT_READ)
    while True:
        if ready.select(0 if engine.has_work else None):
            data = connection.recv(1 << 18)
            if not data:
                return
            for frame in reader.feed(data):
                engine.add(decode_requests(frame))
        if engine.has_work:
            connection.sendall(framed(encode_replies(engine.step())))


def _shake_hands(connection: socket.socket, reader: FrameReader) -> None:
    question = challenge()
    connection.sendall(framed(question.SerializeToString()))
    frames: list[bytes] = []
    while not frames:
        frames = list(reader.feed(connection.recv(1 << 16)))
    connection.sendall(framed(admit(parse(pb.Hello, frames[0]), question, 1, KEY).SerializeToString()))
