"""Kills engines again and again, also while they load: no stream may fail, change a token or be silent for long.

Runs one target, one draft and four concurrent streams. Every few seconds a random engine process gets SIGKILL. An
engine that needs more time to start than passes between two kills might never return.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc

from bench.harness.traffic import PLAINLY, connected, numbered, run
from bench.harness.victims import engine_pids
from bench.models.prompts import held_out_prompts
from bench.results import Result, at_most, say
from deploy.launch import served
from deploy.settings import demo_config
from protos.outrider.v1 import generation_pb2 as pb

NUM_STREAMS = 4
MAX_TOKENS = 1500
GAP_GOAL_S = 20.0
ROLES = {"any": ("target", "draft"), "target": ("target",), "draft": ("draft",)}
SETTLE_S = 0.2
"""Seconds before a failed stream is called again."""


@dataclass(slots=True)
class StreamWatcher:
    """Results of a client that streams the same completion again and again."""

    expected: tuple[int, ...]
    began_s: float
    times_s: list[float] = field(default_factory=list)
    """Arrival times of tokens, in seconds."""
    num_streams: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_changed: int = 0
    """Number of chunks whose tokens differ from plain decoding."""

    def record(self, tokens: Sequence[int], position: int, at_s: float) -> None:
        """Record a chunk that begins at `position` of the output."""
        self.times_s.append(at_s)
        self.num_tokens += len(tokens)
        self.num_changed += tuple(tokens) != self.expected[position : position + len(tokens)]

    def longest_gap_s(self, until_s: float) -> float:
        """Longest time without a token for any reason, in seconds."""
        times_s = [self.began_s, *self.times_s, until_s]
        return max(later - earlier for earlier, later in pairwise(times_s))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=66, metavar="N")
    parser.add_argument("--duration-s", type=float, default=240.0)
    parser.add_argument("--role", choices=tuple(ROLES), default="any", help="whose engines are killed")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims")


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve the demo pair and kill its engines."""
    with served(demo_config(), say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}", args))


async def _measure(address: str, args: argparse.Namespace) -> list[Result]:
    prompts = held_out_prompts(NUM_STREAMS)
    async with connected(address) as stub:
        asked = [numbered(prompt, MAX_TOKENS, index, PLAINLY) for index, prompt in enumerate(prompts)]
        plain = await asyncio.gather(*(run(stub, message) for message in asked))
        began_s = time.monotonic()
        watchers = [StreamWatcher(each.tokens, began_s) for each in plain]
        calls = [
            asyncio.create_task(_listen(stub, numbered(prompt, MAX_TOKENS, i), watcher))
            for i, (prompt, watcher) in enumerate(zip(prompts, watchers, strict=True))
        ]
        await _kill_on(args, began_s)
        ended_s = time.monotonic()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return _results(f"{args.kills} kills in {args.duration_s:g} s", watchers, ended_s)


async def _listen(stub: Any, message: pb.GenerateRequest, watcher: StreamWatcher) -> None:
    """Stream the completion again and again until cancelled."""
    while True:
        watcher.num_streams += 1
        position = 0
        try:
            async for chunk in stub.GenerateStream(message):
                if chunk.token_ids:
                    watcher.record(chunk.token_ids, position, time.monotonic())
                    position += len(chunk.token_ids)
        except grpc.aio.AioRpcError as error:
            watcher.num_failed += 1
            say(f"a stream failed: {error.code().name} {error.details()}")
            await asyncio.sleep(SETTLE_S)


async def _kill_on(args: argparse.Namespace, began_s: float) -> None:
    """Kill one engine after another, at equal intervals."""
    chooser = random.Random(args.seed)
    period_s = args.duration_s / args.kills
    for number in range(args.kills):
        await asyncio.sleep(began_s + (number + 0.5) * period_s - time.monotonic())
        victims = [(pid, role) for role in ROLES[args.role] for pid in engine_pids(role)]
        if victims:
            pid, role = chooser.choice(victims)
            say(f"{time.monotonic() - began_s:.1f} s: a {role} is killed")
            os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(began_s + args.duration_s - time.monotonic())


def _results(title: str, watchers: Sequence[StreamWatcher], ended_s: float) -> list[Result]:
    gaps_s = [watcher.longest_gap_s(ended_s) for watcher in watchers]
    num_tokens = sum(watcher.num_tokens for watcher in watchers)
    failed = sum(watcher.num_failed for watcher in watchers)
    streams = {"streams": sum(watcher.num_streams for watcher in watchers), "tokens": num_tokens}
    return [
        at_most(GAP_GOAL_S, Result(f"{title}: longest time without a token", round(max(gaps_s), 2), "s")),
        at_most(0, Result(f"{title}: failed streams", failed, "streams", settings=streams)),
        at_most(
            0, Result(f"{title}: tokens unlike plain decoding", sum(each.num_changed for each in watchers), "chunks")
        ),
    ]
