"""What a round costs beyond the two models' forward passes: sampling, verification, Ray, orchestration, gRPC.

The demo pair is served as `outrider serve` does it. Runs with and without drafting alternate, alone and sixteen at
once. Forward time is what the engines report of themselves, the rest is what the client's clock has left; with many
streams the two engines work at the same time, so that the parts cannot be told apart, and only totals are given.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.probe import engine_of
from bench.harness.traffic import Run, Way, connected, request, run
from bench.results import Result, say, spread
from bench.service.hops import timed_ms
from deploy.launch import served
from deploy.settings import demo_config

NUM_RUNS = 5
MAX_TOKENS = 128
GAMMA = 4
PROMPT = "import os\nimport sys\n\n\ndef read_lines(path):\n"
NUM_ROUND_TRIPS = 200


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """One run: seconds, all streams together."""

    wall_s: float
    """From the first chunk of the first stream to the end of the last."""
    forward_s: float
    step_s: float
    num_rounds: float
    """Of each stream, on average."""
    num_tokens: int

    @property
    def other_ms(self) -> float:
        return (self.wall_s - self.forward_s) / self.num_rounds * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no settings."""


def measure(args: argparse.Namespace) -> list[Result]:  # noqa: ARG001
    """Serve the demo pair and measure it."""
    with served(demo_config(), say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}"))


async def _measure(address: str) -> list[Result]:
    engines = [await engine_of("target"), await engine_of("draft")]
    async with connected(address) as stub:
        cases = [(gamma, num_streams) for num_streams in (1, 16) for gamma in (GAMMA, 0)]
        samples: dict[tuple[int, int], list[OverheadSample]] = {case: [] for case in cases}
        for number in range(NUM_RUNS + 1):
            for case in cases:
                sample = await _run(stub, engines, *case)
                if number > 0:  # the first of each is a warm-up
                    samples[case].append(sample)
    round_trips = await timed_ms(engines[0].ready.remote, NUM_ROUND_TRIPS)
    results = [result for case in cases for result in _results(*case, samples[case])]
    return [*results, spread("bare actor round trip", round_trips, "ms"), *_ratios(samples)]


async def _run(stub: Any, engines: Sequence[Any], gamma: int, num_streams: int) -> OverheadSample:
    before = [await engine.stats.remote() for engine in engines]
    streams = await asyncio.gather(*(_stream(stub, gamma, seed) for seed in range(num_streams)))
    after = [await engine.stats.remote() for engine in engines]
    pairs = list(zip(before, after, strict=True))
    return OverheadSample(
        wall_s=max(each.arrivals[-1].at_s for each in streams) - min(each.began_s for each in streams),
        forward_s=sum(new.forward_time_s - old.forward_time_s for old, new in pairs),
        step_s=sum(new.step_time_s - old.step_time_s for old, new in pairs),
        num_rounds=sum(each.stats.target_passes for each in streams) / num_streams,
        num_tokens=MAX_TOKENS * num_streams,
    )


async def _stream(stub: Any, gamma: int, seed: int) -> Run:
    return await run(stub, request(PROMPT, MAX_TOKENS, temperature=0.8, way=Way(gamma), seed=seed))


def _results(gamma: int, num_streams: int, samples: Sequence[OverheadSample]) -> list[Result]:
    settings = {"gamma": gamma, "streams": num_streams, "max_tokens": MAX_TOKENS}
    name = f"{'drafted' if gamma else 'plain'} x{num_streams}"
    per_round = [(sample, 1e3 / sample.num_rounds) for sample in samples]
    totals = [
        spread(f"{name}: a round", [s.wall_s * scale for s, scale in per_round], "ms", **settings),
        spread(f"{name}: tokens a round", [s.num_tokens / num_streams / s.num_rounds for s in samples], "tokens"),
    ]
    if num_streams > 1:
        return totals
    return [
        *totals,
        spread(f"{name}: forward passes", [s.forward_s * scale for s, scale in per_round], "ms"),
        spread(f"{name}: sampling and bookkeeping", [(s.step_s - s.forward_s) * scale for s, scale in per_round], "ms"),
        spread(f"{name}: Ray, orchestration, gRPC", [(s.wall_s - s.step_s) * scale for s, scale in per_round], "ms"),
        spread(f"{name}: all that is not model time", [s.other_ms for s in samples], "ms"),
    ]


def _ratios(samples: dict[tuple[int, int], list[OverheadSample]]) -> list[Result]:
    """Plain over drafted, pair by pair: these ran one after the other."""
    return [
        spread(
            f"speed-up of drafting, x{num_streams}",
            [
                plain.wall_s / drafted.wall_s
                for plain, drafted in zip(samples[0, num_streams], samples[GAMMA, num_streams], strict=True)
            ],
            "x",
        )
        for num_streams in (1, 16)
    ]
