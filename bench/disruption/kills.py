"""Kills engines and orchestrators of a served demo pair while streams run: no stream may fail or change a token.

Also stops the draft's process for a while. Each stream is compared with plain decoding of the same request. Guessers
are turned off, so that the pace without a draft is that of plain decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import numpy as np

from bench.disruption.freeze import measure_freeze
from bench.harness.traffic import AS_SERVED, PLAINLY, Arrival, connected, numbered, run, temperature_of
from bench.harness.victims import kill_engine, kill_replica, serving, until_replaced
from bench.models.prompts import held_out_prompts
from bench.results import Result, at_most, say, spread
from deploy.launch import served
from deploy.settings import demo_config
from outrider_client import AsyncClient, OutriderError

SETTINGS = (
    "target.num_replicas=2",
    "orchestrator.num_replicas=2",
    "speculation.guessers=[draft]",
    "speculation.policy=static",  # the adaptive policy might rest the draft, and killing a resting draft has no effect
    "speculation.max_draft_tokens=4",
)
NUM_STREAMS = 4
MAX_TOKENS = 128
MAX_DELAY_S = 0.5
"""Longest random delay of a kill after every stream has begun, in seconds."""
STALL_GOAL_S = 0.3
"""Goal for streams whose draft dies. They continue plainly on processors on which the next draft starts."""

Show = Callable[[Arrival], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """Repeated kills of one role."""

    role: str
    num_kills: int
    kill: Callable[[], Awaitable[None]]
    complete: Callable[[int, Show], Awaitable[bool]]
    """Streams the prompt of this number, shows each chunk, and returns whether a death affected the stream."""


@dataclass(slots=True)
class WatchedStream:
    """One stream during which a process is killed."""

    expected: tuple[int, ...]
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first chunk arrives, or when the stream fails."""
    arrivals: list[Arrival] = field(default_factory=list)
    failure: str = ""
    was_affected: bool = False
    is_over: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for arrival in self.arrivals for token in arrival.token_ids)

    def take(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.has_begun.set()

    def stall_s(self, since_s: float) -> float:
        """Longest time between two chunks, the later of which arrived after `since_s`, in seconds."""
        times = [arrival.at_s for arrival in self.arrivals]
        return max((later - earlier for earlier, later in pairwise(times) if later > since_s), default=0.0)


@dataclass(frozen=True, slots=True)
class Death:
    """One kill, and the streams that were running at that time."""

    at_s: float
    streams: tuple[WatchedStream, ...]
    replaced_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-kills", type=int, default=50, metavar="N")
    parser.add_argument("--target-kills", type=int, default=50, metavar="N")
    parser.add_argument("--orchestrator-kills", type=int, default=20, metavar="N")
    parser.add_argument("--stop-s", type=float, default=30.0, help="how long the draft stands still; 0 leaves that out")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of death")


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve the demo pair with two targets and two orchestrators, and kill them in turn."""
    with served(demo_config(SETTINGS), say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}", args))


async def _measure(address: str, args: argparse.Namespace) -> list[Result]:
    prompts, chooser = held_out_prompts(NUM_STREAMS), random.Random(args.seed)
    results: list[Result] = []
    async with connected(address) as stub, AsyncClient(address) as client:
        messages, plain = (
            [numbered(prompt, MAX_TOKENS, index, way) for index, prompt in enumerate(prompts)]
            for way in (AS_SERVED, PLAINLY)
        )
        expected = [(await run(stub, message)).tokens for message in plain]

        async def by_stub(index: int, show: Show) -> bool:
            stats = (await run(stub, messages[index], show=show)).stats
            return bool(stats.draft_failures or stats.target_failures)

        async def by_client(index: int, show: Show) -> bool:
            return await _stream_by_client(client, prompts[index], index, show)

        for trial in (
            Trial("draft", args.draft_kills, lambda: kill_engine("draft"), by_stub),
            Trial("target", args.target_kills, lambda: kill_engine("target"), by_stub),
            Trial("orchestrator", args.orchestrator_kills, lambda: kill_replica("orchestrator", chooser), by_client),
        ):
            results += await _try(trial, expected, chooser)
        if args.stop_s:
            say(f"stopping the draft for {args.stop_s:g} s")
            results += await measure_freeze(stub, prompts, args.stop_s)
    return results


async def _stream_by_client(client: AsyncClient, prompt: str, index: int, show: Show) -> bool:
    """Stream one prompt. Return whether it took more than one call."""
    async with client.stream(
        prompt, max_tokens=MAX_TOKENS, temperature=temperature_of(index), seed=index, ignore_eos=True
    ) as stream:
        async for chunk in stream:
            show(Arrival(time.monotonic(), chunk.token_ids, sum(chunk.guessed)))
        return stream.num_calls > 1


async def _try(trial: Trial, expected: Sequence[tuple[int, ...]], chooser: random.Random) -> list[Result]:
    deaths = []
    for number in range(trial.num_kills):
        say(f"{trial.role}: death {number + 1} of {trial.num_kills}")
        deaths.append(await _die(trial, [WatchedStream(tokens) for tokens in expected], chooser))
    return _results(f"{trial.role} killed {trial.num_kills} times", deaths) if deaths else []


async def _die(trial: Trial, streams: Sequence[WatchedStream], chooser: random.Random) -> Death:
    """Kill while all `streams` run, let them end, and wait until the killed process is replaced."""
    tasks = [asyncio.create_task(_follow(trial, index, stream)) for index, stream in enumerate(streams)]
    await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
    await asyncio.sleep(chooser.uniform(0, MAX_DELAY_S))
    before = await serving(trial.role)
    await trial.kill()
    at_s = time.monotonic()
    under_way = tuple(stream for stream in streams if not stream.is_over)
    await asyncio.gather(*tasks)
    return Death(at_s, under_way, await until_replaced(trial.role, before, since_s=at_s))


async def _follow(trial: Trial, index: int, stream: WatchedStream) -> None:
    try:
        stream.was_affected = await trial.complete(index, stream.take)
    except (grpc.aio.AioRpcError, OutriderError) as error:
        stream.failure = str(error)
        say(f"stream {index} failed: {' '.join(stream.failure.split())}")
    finally:
        stream.is_over = True
        stream.has_begun.set()


def _results(title: str, deaths: Sequence[Death]) -> list[Result]:
    streams = [stream for death in deaths for stream in death.streams]
    failed = [stream for stream in streams if stream.failure]
    changed = [stream for stream in streams if not stream.failure and stream.tokens != stream.expected]
    stalls_s = [stream.stall_s(death.at_s) for death in deaths for stream in death.streams]
    counts: dict[str, Any] = {"streams": len(streams), "felt": sum(stream.was_affected for stream in streams)}
    p99_s = float(np.quantile(stalls_s, 0.99)) if stalls_s else float("nan")
    stall = Result(
        f"{title}: longest gap in a stream, p99", round(p99_s, 3), "s", settings={"max": max(stalls_s, default=0)}
    )
    return [
        at_most(0, Result(f"{title}: failed streams", len(failed), "streams", settings=counts)),
        at_most(0, Result(f"{title}: streams unlike plain decoding", len(changed), "streams")),
        at_most(STALL_GOAL_S, stall) if title.startswith("draft") else stall,
        spread(f"{title}: replaced after", [death.replaced_s for death in deaths], "s"),
    ]
