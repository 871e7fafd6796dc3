"""The cost of a call by gRPC and by HTTP: time to first token, and memory of a thousand waiting calls.

Times are measured on an otherwise idle service. The two protocols take turns, call by call, so that slow moments affect
both. Waiting calls are open streams that are admitted and queued. Their memory is the growth of the proxy's and the
orchestrator's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
from ray._private.state import actors

from bench.results import Result, at_most
from deploy.cli.load.callers import Fields, GrpcCaller, LoadCaller
from deploy.cli.load.http_caller import HttpCaller
from deploy.cli.load.records import Arrival, LoadRequest
from deploy.launch import Endpoints, served
from deploy.settings import demo_config

WAYS = ("grpc", "http")
RATIO_GOAL = 1.3
WAITING_GOAL_MB = 50.0
OUTPUT_TOKENS = 8
PLACES = 4
HELD_TOKENS = 2000
"""Output length of the streams that occupy all places, close to the demo pair's context."""
WARM_UP = 20
SETTLE_S = 3.0
"""Seconds from the last call to the memory reading."""
ARRIVAL_TIMEOUT_S = 60.0
"""Longest time for the calls to reach the queue, in seconds."""
POLL_S = 0.5
PAUSE_S = 0.01
FIELDS = Fields(model=None, temperature=0.0, ignore_eos=True, no_draft=False)
WAITING_IN = ("ProxyActor", "orchestrator")
"""Parts of the names of the actors that hold a call while it waits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=300, metavar="N", help="timed by each way")
    parser.add_argument("--waiting", type=int, default=1000, metavar="N", help="streams that wait, by each way")


def measure(args: argparse.Namespace) -> list[Result]:
    """Call the demo pair with few places and a long queue. Each memory measurement uses a new service, because an old
    process would reuse freed memory."""
    config = demo_config()
    limits = replace(config.limits, max_sessions=PLACES, max_queued=args.waiting + PLACES)
    config = replace(config, limits=limits)
    with served(config, _say) as endpoints:
        results = asyncio.run(_first_tokens(endpoints, args.calls))
    for name in WAYS:
        with served(config, _say) as endpoints:
            results.append(asyncio.run(_memory(endpoints, name, args.waiting)))
    return results


def _say(line: str) -> None:
    print(line, flush=True)


@asynccontextmanager
async def _callers(endpoints: Endpoints) -> AsyncIterator[Mapping[str, LoadCaller]]:
    callers: Mapping[str, LoadCaller] = {
        "grpc": GrpcCaller(f"localhost:{endpoints.grpc_port}", None, FIELDS),
        "http": HttpCaller(f"localhost:{endpoints.http_port}", None, FIELDS),
    }
    try:
        yield callers
    finally:
        for caller in callers.values():
            await caller.close()


# Time to the first token


async def _first_tokens(endpoints: Endpoints, num_calls: int) -> list[Result]:
    async with _callers(endpoints) as callers:
        times_s = await _times_s(callers, num_calls)
    return [result for share in (0.5, 0.9) for result in _compared(times_s, share)]


async def _times_s(callers: Mapping[str, LoadCaller], num_calls: int) -> dict[str, list[float]]:
    times_s: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(WARM_UP + num_calls):
        for name in WAYS if number % 2 else WAYS[::-1]:
            took_s = await _first_token_s(callers[name], number)
            if number >= WARM_UP:
                times_s[name].append(took_s)
            await asyncio.sleep(PAUSE_S)
    return times_s


async def _first_token_s(caller: LoadCaller, number: int) -> float:
    """Seconds to the first token. Reads the stream to its end."""
    began_s, first_s = time.perf_counter(), None
    async for arrival in caller.stream(LoadRequest(f"def f{number}(x):\n", OUTPUT_TOKENS, seed=0)):
        if first_s is None and arrival.num_tokens:
            first_s = time.perf_counter()
    assert first_s is not None, "an output has tokens"
    return first_s - began_s


def _compared(times_s: Mapping[str, Sequence[float]], share: float) -> list[Result]:
    at_s = {name: float(np.quantile(values, share)) for name, values in times_s.items()}
    end = f"p{100 * share:.0f}"
    ratio = Result(f"first_token_http_over_grpc_{end}", at_s["http"] / at_s["grpc"], "x")
    return [
        *(Result(f"first_token_{name}_{end}", value, "s") for name, value in at_s.items()),
        at_most(RATIO_GOAL, ratio),
    ]


# Memory of streams that wait


async def _memory(endpoints: Endpoints, name: str, num_waiting: int) -> Result:
    """Memory of `num_waiting` streams behind others that occupy all places."""
    async with _callers(endpoints) as callers, _streams(callers[name], PLACES, HELD_TOKENS) as holders:
        caller = callers[name]
        await asyncio.wait(holders)  # after their first tokens they occupy the places
        async with _streams(caller, WARM_UP, 1):
            await asyncio.sleep(SETTLE_S)
        before_mb = _resident_mb()
        async with _streams(caller, num_waiting, 1) as waiting:
            num_queued = await _queued(endpoints, num_waiting)
            await asyncio.sleep(SETTLE_S)
            after_mb = _resident_mb()
            num_begun = len([task.result() for task in waiting if task.done()])  # raises the error of a refused call
    grown_mb = {part: round(after_mb[part] - before_mb[part], 1) for part in WAITING_IN}
    settings = {"streams": num_waiting, "queued": num_queued, "begun": num_begun, **grown_mb}
    return at_most(WAITING_GOAL_MB, Result(f"waiting_{name}", sum(grown_mb.values()), "MB", settings=settings))


async def _queued(endpoints: Endpoints, num_waiting: int) -> int:
    """Number of calls in the orchestrator's queue, by its own report. Returns when all are there, or after a
    timeout."""
    url = f"http://localhost:{endpoints.http_port}/v1/outrider/status"
    end_s, num_queued = time.monotonic() + ARRIVAL_TIMEOUT_S, 0
    async with aiohttp.ClientSession() as session:
        while num_queued < num_waiting and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
            async with session.get(url) as response:
                num_queued = (await response.json())["models"][0]["queue"]["waiting"]
    return num_queued


@asynccontextmanager
async def _streams(caller: LoadCaller, num: int, max_tokens: int) -> AsyncIterator[list[asyncio.Task[Arrival]]]:
    """Open `num` streams and wait for their first pieces. The streams are abandoned at the end."""
    streams = [caller.stream(LoadRequest(f"def f{number}(x):\n", max_tokens, seed=0)) for number in range(num)]
    pieces = [asyncio.ensure_future(anext(stream)) for stream in streams]
    try:
        yield pieces
    finally:
        for piece in pieces:
            piece.cancel()
        await asyncio.gather(*pieces, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _resident_mb() -> dict[str, float]:
    """Resident memory of the processes that hold waiting calls, in MB."""
    alive = [each for each in actors().values() if each["State"] == "ALIVE"]
    return {part: sum(_rss_mb(each["Pid"]) for each in alive if part in each["ActorClassName"]) for part in WAITING_IN}


def _rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (resident,) = (line for line in lines if line.startswith("VmRSS"))
    return int(resident.split()[1]) / 1024
