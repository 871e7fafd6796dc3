"""Effects of callers on each other: time until a full service refuses, stalls by floods, delay of deadlines.

Streams run in their own process, so that reading them does not slow down the timed caller. The flooding caller runs in
another process, which gets only idle processor time, to resemble a caller on another machine. On two cores, three
callers with messages of 100 MB stall streams for the same time even if another server receives the messages
(docs/log/2026-11.md). `streams_alone` is the longest gap without other callers.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from bench.harness.traffic import AS_SERVED, connected, request, run
from bench.results import Result, at_most
from deploy.launch import served
from deploy.settings import demo_config
from protos.outrider.v1 import generation_pb2 as pb

PROMPT = "def f(x):\n"
STREAM_TOKENS = 1500
REFUSAL_GOAL_S = 0.02
GAP_GOAL_S = 0.3
LATE_GOAL_S = 0.02
PAUSE_S = 0.02
"""Seconds between refusals that are timed one by one."""
OVERSIZE = (3_900_000, 8_000_000, 100_000_000)
FLOODERS = 3
FLOOD_S = 5.0
Beside = Callable[[], Awaitable[int]]
"""Function that runs while streams are read, and returns the number of its calls."""
DEADLINES_S = (0.3, 0.4, 0.5, 0.6, 0.7)


@dataclass(frozen=True, slots=True)
class Refusals:
    """Outcomes of calls, and the durations of refused ones."""

    outcomes: Counter[str]
    times_s: tuple[float, ...]

    def quantile_s(self, share: float) -> float:
        return float(np.quantile(self.times_s, share))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="in progress at most, and beside refusals")
    parser.add_argument("--refusals", type=int, default=300, metavar="N", help="that are timed one by one")
    parser.add_argument("--burst", type=int, default=320, metavar="N", help="calls at the same moment")
    parser.add_argument("--flooded", type=int, default=4, metavar="N", help="streams beside the floods")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of the floods, in turn")


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve the demo pair with few places, and overload it."""
    config = demo_config()
    config = replace(config, limits=replace(config.limits, max_sessions=args.streams, max_queued=0))
    with served(config, lambda line: print(line, flush=True)) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}", args))


async def _measure(address: str, args: argparse.Namespace) -> list[Result]:
    async with connected(address) as stub:
        await run(stub, _request(4))  # afterwards the proxy knows the number of places
        return [
            *await _refusals(address, stub, args),
            *await _burst(stub, args),
            *await _floods(address, args),
            await _lateness(stub),
        ]


def _request(max_tokens: int, **changes: Any) -> pb.GenerateRequest:
    message = request(PROMPT, max_tokens, temperature=0.0, way=AS_SERVED)
    message.MergeFrom(pb.GenerateRequest(**changes))
    return message


async def _refusals(address: str, stub: Any, args: argparse.Namespace) -> list[Result]:
    """Time refusals one by one while every place is taken."""
    refusals = Refusals(Counter(), ())
    async with _streams(address, args.streams):
        for _ in range(args.refusals):
            refusals = _with(refusals, *await _attempt(stub))
            await asyncio.sleep(PAUSE_S)
    return [
        Result("refused_beside_streams_p50", refusals.quantile_s(0.5), "s", settings=dict(refusals.outcomes)),
        at_most(REFUSAL_GOAL_S, Result("refused_beside_streams_p99", refusals.quantile_s(0.99), "s")),
    ]


async def _burst(stub: Any, args: argparse.Namespace) -> list[Result]:
    """Call all at once: the first calls take the places, the others are refused."""
    attempts = await asyncio.gather(*(_attempt(stub) for _ in range(args.burst)))
    refusals = Refusals(Counter(), ())
    for attempt in attempts:
        refusals = _with(refusals, *attempt)
    outcomes = dict(refusals.outcomes)
    num_lost = sum(num for outcome, num in outcomes.items() if outcome not in ("OK", "RESOURCE_EXHAUSTED"))
    return [
        Result("refused_in_a_burst_p50", refusals.quantile_s(0.5), "s", settings=outcomes),
        Result("refused_in_a_burst_p99", refusals.quantile_s(0.99), "s"),
        at_most(0, Result("ended_otherwise", num_lost, "calls")),
    ]


async def _attempt(stub: Any) -> tuple[str, float]:
    began_s = time.monotonic()
    try:
        await run(stub, _request(16))
    except grpc.aio.AioRpcError as error:
        return error.code().name, time.monotonic() - began_s
    return "OK", time.monotonic() - began_s


def _with(refusals: Refusals, outcome: str, took_s: float) -> Refusals:
    times_s = refusals.times_s if outcome == "OK" else (*refusals.times_s, took_s)
    return Refusals(refusals.outcomes + Counter([outcome]), times_s)


async def _floods(address: str, args: argparse.Namespace) -> list[Result]:
    """The longest gap of streams, alone and beside callers that send messages of the largest allowed size, or larger.

    Each case is measured several times in turn, because on few cores some gaps are as long without other callers.
    """
    async with connected(address) as stub:
        most = await _longest_text(stub)
    floods = {
        "permitted": [_request(1, text=most)],
        "oversize": [_request(1, text="x" * size) for size in OVERSIZE],
    }
    beside: dict[str, Beside] = {"alone": _rest}
    beside |= {f"beside_{name}": partial(_flood, address, messages) for name, messages in floods.items()}
    gaps_s: dict[str, list[float]] = {name: [] for name in beside}
    num_calls: Counter[str] = Counter()
    for _ in range(args.repeats):
        for name, others in beside.items():
            gap_s, num = await _gap_beside(address, args.flooded, others)
            gaps_s[name].append(gap_s)
            num_calls[name] += num
    results = [_longest("alone", gaps_s["alone"], {"streams": args.flooded})]
    for name, messages in floods.items():
        settings = {
            "largest_bytes": max(message.ByteSize() for message in messages),
            "callers": FLOODERS,
            "calls": num_calls[f"beside_{name}"],
        }
        results.append(at_most(GAP_GOAL_S, _longest(f"beside_{name}", gaps_s[f"beside_{name}"], settings)))
    return results


def _longest(name: str, gaps_s: Sequence[float], settings: dict[str, Any]) -> Result:
    spread = f"{min(gaps_s):.2f} to {max(gaps_s):.2f}"
    return Result(f"streams_{name}", float(np.median(gaps_s)), "s", settings={**settings, "spread": spread})


async def _longest_text(stub: Any) -> str:
    """The longest text that is not refused for its length alone, found by bisection."""
    low, high = 1, 4 * 2**20
    while high - low > 1024:
        middle = (low + high) // 2
        try:
            await stub.Generate(_request(1, text="x" * middle))
            low = middle
        except grpc.aio.AioRpcError as error:
            is_by_length = "bytes" in (error.details() or "")
            low, high = (low, middle) if is_by_length else (middle, high)
    return "x" * low


async def _gap_beside(address: str, num_streams: int, beside: Beside) -> tuple[float, int]:
    async with _streams(address, num_streams) as ended:
        num_calls = await beside()
        return await ended(), num_calls


async def _rest() -> int:
    await asyncio.sleep(FLOOD_S)
    return 0


async def _flood(address: str, messages: Sequence[pb.GenerateRequest]) -> int:
    """Send messages from several callers in a process of their own. Return the number of calls."""
    ours, theirs = multiprocessing.Pipe()
    sizes = [len(message.text) for message in messages]
    process = multiprocessing.get_context("spawn").Process(target=_call_idly, args=(theirs, address, sizes))
    process.start()
    theirs.close()  # so that an early end of the process is noticed
    num_calls: int = await asyncio.to_thread(ours.recv)
    await asyncio.to_thread(process.join)
    return num_calls


def _call_idly(pipe: Connection, address: str, sizes: Sequence[int]) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    pipe.send(asyncio.run(_call(address, sizes)))


async def _call(address: str, sizes: Sequence[int]) -> int:
    end_s = time.monotonic() + FLOOD_S

    async def send() -> int:
        num_calls = 0
        async with connected(address) as stub:
            while time.monotonic() < end_s:
                for size in sizes:
                    await _outcome(stub.Generate(_request(1, text="x" * size)))
                    num_calls += 1
        return num_calls

    return sum(await asyncio.gather(*(send() for _ in range(FLOODERS))))


async def _outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _lateness(stub: Any) -> Result:
    """How late a deadline set only in the request's field takes effect."""
    late_s = []
    for timeout_s in DEADLINES_S * 4:
        began_s = time.monotonic()
        outcome = await _outcome(stub.Generate(_request(STREAM_TOKENS, timeout_s=timeout_s)))
        assert outcome == "DEADLINE_EXCEEDED", outcome
        late_s.append(time.monotonic() - began_s - timeout_s)
    return at_most(LATE_GOAL_S, Result("deadline_late_p50", float(np.median(late_s)), "s"))


# Streams in a process of their own


@asynccontextmanager
async def _streams(address: str, num_streams: int) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Run `num_streams` streams, all begun. The yielded function ends them and returns their longest gap in seconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_read_streams, args=(theirs, address, num_streams))
    process.start()
    try:
        await asyncio.to_thread(ours.recv)

        async def ended() -> float:
            ours.send(None)
            gap_s: float = await asyncio.to_thread(ours.recv)
            return gap_s

        yield ended
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def _read_streams(pipe: Connection, address: str, num_streams: int) -> None:
    asyncio.run(_read(pipe, address, num_streams))


async def _read(pipe: Connection, address: str, num_streams: int) -> None:
    last_s: list[float | None] = [None] * num_streams
    gaps_s: list[float] = []
    all_begun = asyncio.Event()

    async def read(stub: Any, index: int) -> None:
        while True:
            async for _ in stub.GenerateStream(_request(STREAM_TOKENS)):
                now_s, before_s = time.monotonic(), last_s[index]
                last_s[index] = now_s
                if None not in last_s:
                    all_begun.set()
                gaps_s.append(0.0 if before_s is None else now_s - before_s)
            last_s[index] = None  # the next stream begins with prefill, which is not a gap

    async with connected(address) as stub:
        reading = [asyncio.ensure_future(read(stub, index)) for index in range(num_streams)]
        await all_begun.wait()
        gaps_s.clear()
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        pipe.send(max(gaps_s))
        for task in reading:
            task.cancel()
