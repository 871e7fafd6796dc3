"""Streams from a server as a client sees them: tokens, arrival times, and the server's own trace.

Knows the wire format and the clock; must not know what is measured.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc

from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc


@dataclass(frozen=True, slots=True)
class Arrival:
    """One chunk."""

    at_s: float
    """Time on this process's monotonic clock, in seconds."""
    token_ids: tuple[int, ...]
    num_guessed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One stream, from its call to its end."""

    began_s: float
    arrivals: tuple[Arrival, ...]
    calls: tuple[pb.CallTrace, ...]
    stats: pb.SpeculationStats

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for arrival in self.arrivals for token in arrival.token_ids)

    @property
    def decode_s(self) -> float:
        """Seconds from the first chunk to the last, so without prefill."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    @property
    def longest_gap_s(self) -> float:
        """Longest time without a chunk, in seconds, including the time before the first."""
        times = [self.began_s, *(arrival.at_s for arrival in self.arrivals)]
        return max(later - earlier for earlier, later in pairwise(times))


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
    """The stub of the service at `address`."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def run(stub: Any, request: pb.GenerateRequest, show: Callable[[Arrival], None] = lambda _: None) -> Run:
    """Read a stream to its end. Raises: grpc.aio.AioRpcError."""
    began_s = time.monotonic()
    arrivals: list[Arrival] = []
    calls: list[pb.CallTrace] = []
    chunk = pb.GenerateChunk()
    async for chunk in stub.GenerateStream(request):
        arrivals.append(Arrival(time.monotonic(), tuple(chunk.token_ids), sum(chunk.guessed)))
        calls += chunk.trace
        show(arrivals[-1])
    assert chunk.HasField("finish"), "the last chunk says how the stream ended"
    return Run(began_s, tuple(arrivals), tuple(calls), chunk.finish.speculation)


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding, as fields of the request."""

    gamma: int | None = None
    """Largest draft length; 0 decodes plainly, None leaves it to the server."""
    policy: str = ""
    pipelining: bool | None = None


AS_SERVED, PLAINLY, IN_TURN = Way(), Way(gamma=0), Way(pipelining=False)
TEMPERATURES = (0.0, 0.8)
"""Temperatures of streams that are compared with plain decoding, in turn."""


def temperature_of(index: int) -> float:
    return TEMPERATURES[index % len(TEMPERATURES)]


def numbered(prompt: str, max_tokens: int, index: int, way: Way = AS_SERVED) -> pb.GenerateRequest:
    """The request of stream number `index`, which is also its seed."""
    return request(prompt, max_tokens, temperature=temperature_of(index), way=way, seed=index)


def request(
    prompt: str, max_tokens: int, *, temperature: float, way: Way = AS_SERVED, seed: int = 0, trace: bool = False
) -> pb.GenerateRequest:
    """A request for exactly `max_tokens` tokens."""
    return pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingParams(temperature=temperature, seed=seed),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        speculation=pb.SpeculationParams(
            max_draft_tokens=way.gamma, policy=way.policy, pipelining=way.pipelining, trace=trace
        ),
    )
