"""Ways for the frames of a round: today's link, grpc.aio's streams, and a link that the engine's own thread reads.

One orchestrator in this process and one engine in another exchange real frames: a block of 8 is verified, and meanwhile
growth is sent at a draft's pace. Nothing is decided or computed; passes are waits. Ways take turns, on idle cores and
beside busy ones. The second and third way are prototypes (docs/adr/links), without authentication and flow control.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice, pairwise
from multiprocessing.connection import Connection
from typing import Any, cast

import grpc
import grpc.aio
import uvloop

from bench.results import Result, say, spread
from bench.service.stream_engines import GRPC, LINK, METHOD, ONE_THREAD, PASS_S, PASSES, serve
from core.records import Base, DraftRequest, DraftUpdate, Stamp, VerifyRequest
from core.speculation import ROOT, TokenTree, TreeSpec
from deploy.link.client import Link
from deploy.link.replies import decode_replies
from deploy.link.requests import encode_requests

WAYS = (LINK, GRPC, ONE_THREAD)
NUM_BUSY = 2
"""Number of busy processes beside the two, on a machine of two cores."""
BLOCK = TokenTree(tuple(range(1, 9)), tuple(range(ROOT, 7)))
SPIN = "while True: pass"


@dataclass(frozen=True, slots=True)
class Turn:
    """Several rounds by one way."""

    outside_ms: tuple[float, ...]
    """Milliseconds of each round, from sending one verification to the next, without the engine's passes."""
    cpu_ms: tuple[float, float]
    """Processor time of a round in milliseconds, of this process and of the engine's."""


class GrpcStream:
    """Like `deploy.link.client.Link`, over one bidirectional gRPC stream."""

    def __init__(self, port: int) -> None:
        self._channel = cast("Any", grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        self._stream = self._channel.stream_stream(METHOD)()
        self._numbers = count()
        self._open: dict[int, tuple[asyncio.Future[Any], Callable[[DraftUpdate], None] | None]] = {}
        self._may_write = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def exchange(self, batch: Sequence[VerifyRequest]) -> list[Any]:
        """Send a batch of one request, which suffices here."""
        return [await self._ask(batch[0])]

    async def grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> Any:
        return await self._ask(request, take)

    async def _ask(
        self, request: VerifyRequest | DraftRequest, take: Callable[[DraftUpdate], None] | None = None
    ) -> Any:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = future, take
        async with self._may_write:  # a gRPC stream takes one message at a time
            await self._stream.write(encode_requests(number, [request]))
        return await future

    async def _read(self) -> None:
        async for frame in self._stream:
            for number, reply in decode_replies(frame)[0]:
                future, take = self._open[number]
                if take is not None and isinstance(reply, DraftUpdate):
                    take(reply)
                else:
                    future.set_result(reply)

    async def close(self) -> None:
        """Close the channel. Open calls get no answer."""
        self._reading.cancel()
        await self._channel.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200, help="of each turn")


def measure(args: argparse.Namespace) -> list[Result]:
    """Measure all ways in turn, first on idle cores, then beside busy processes."""
    context = multiprocessing.get_context("spawn")
    engines, started = {}, []
    for way in WAYS:
        engines[way], theirs = context.Pipe()
        started.append(context.Process(target=serve, args=(way, theirs), daemon=True))
        started[-1].start()
    try:
        return uvloop.run(_measure(engines, args.repeats, args.rounds))
    finally:
        for process in started:
            process.kill()
            process.join()


async def _measure(engines: Mapping[str, Connection], num_repeats: int, num_rounds: int) -> list[Result]:
    lines = {way: await Line.open(way, engine) for way, engine in engines.items()}
    results: list[Result] = []
    for num_busy in (0, NUM_BUSY):
        turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
        with _busy(num_busy):
            for repeat in range(num_repeats):
                say(f"{num_busy} busy processes, repeat {repeat + 1} of {num_repeats}")
                for place in range(len(WAYS)):
                    way = WAYS[(repeat + place) % len(WAYS)]  # each way comes first, second and last equally often
                    turns[way].append(await lines[way].turn(num_rounds))
        for way in WAYS:
            results += _results(f"{way}, {num_busy} busy", turns[way])
    for line in lines.values():
        await line.close()
    return results


@contextmanager
def _busy(num: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class Line:
    """An open connection to an engine by one way."""

    def __init__(self, stream: Any, engine: Connection) -> None:
        self._stream = stream
        self._engine = engine
        self._num_heard = 0
        self._rounds = count(1)
        self._growing = asyncio.create_task(stream.grow(_growth(), self._hear))

    @classmethod
    async def open(cls, way: str, engine: Connection) -> Line:
        address = await asyncio.to_thread(engine.recv)
        line = cls(GrpcStream(address) if way == GRPC else await Link.open(address), engine)
        await line.turn(20)  # a warm-up
        return line

    def _hear(self, _: DraftUpdate) -> None:
        self._num_heard += 1

    async def turn(self, num_rounds: int) -> Turn:
        """Run `num_rounds` rounds, one after the other."""
        heard, before, sent_s = self._num_heard, (time.process_time(), self._engine_cpu_s()), [time.perf_counter()]
        for round_ in islice(self._rounds, num_rounds):
            await self._stream.exchange([_verify(round_)])
            sent_s.append(time.perf_counter())
        spent = (time.process_time() - before[0], self._engine_cpu_s() - before[1])
        assert self._num_heard - heard >= (PASSES - 1) * num_rounds, "growth is told after each pass"
        outside = tuple(1e3 * (after - start - PASSES * PASS_S) for start, after in pairwise(sent_s))
        return Turn(outside, (1e3 * spent[0] / num_rounds, 1e3 * spent[1] / num_rounds))

    def _engine_cpu_s(self) -> float:
        self._engine.send("cpu")
        spent_s: float = self._engine.recv()
        return spent_s

    async def close(self) -> None:
        """Close the connection without waiting for open calls."""
        self._growing.cancel()
        closing = self._stream.close() if isinstance(self._stream, GrpcStream) else self._stream.close("measured")
        if closing is not None:
            await closing


def _verify(round_: int) -> VerifyRequest:
    return VerifyRequest(Stamp("session-0123456789", 1, round_), Base(200, 1 << 60), (1, 2, 3, 4), BLOCK)


def _growth() -> DraftRequest:
    return DraftRequest(Stamp("session-0123456789", 1, 1), Base(200, 1 << 60), (1, 2, 3, 4), TreeSpec(64, 17))


def _results(name: str, turns: Sequence[Turn]) -> list[Result]:
    late = [statistics.quantiles(turn.outside_ms, n=10)[-1] for turn in turns]
    return [
        spread(f"{name}: outside the passes", [statistics.median(turn.outside_ms) for turn in turns], "ms"),
        spread(f"{name}: the same, p90", late, "ms"),
        spread(f"{name}: processor time, orchestrator", [turn.cpu_ms[0] for turn in turns], "ms"),
        spread(f"{name}: processor time, engine", [turn.cpu_ms[1] for turn in turns], "ms"),
    ]
