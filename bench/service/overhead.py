"""The cost of a round beyond the two models' forward passes: time of a step, time after a verdict, processor time.

The demo pair is served as by `outrider serve`. Plain and drafted runs alternate, first with one stream, then with
sixteen, in which the policy learns to pause drafting. Goals are for one stream:

- *All that is not model time*, of a plain step: the time by the client's clock, from the call to the last chunk, minus
  the target's forward passes as reported by the engine. Drafted rounds have no such figure, since their draft passes
  overlap with the target's. For the same reason, runs with many streams have totals only.
- *Verdict to next verify*, of drafted rounds whose next block was ready at the verdict (hits), from their trace:
  "orchestrator" is the time from receiving the verdict to sending the next block; "link" is the verification's round
  trip without queueing and computing at the engine, which is one way in each direction.
- *Processor time*, of all processes of the service and of this client, by process, without forward passes. An engine
  reports only the durations of its passes, which exceed their processor time if other processes delay them. Passes and
  the rest of a step run in one thread, the busiest of the process. Its processor time is therefore divided between them
  in proportion to their durations.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness.anatomy import Round, medians_ms, rounds_of
from bench.harness.probe import engine_of
from bench.harness.processor import PROCESSOR_GOAL_MS, busiest_s, cpu_s, processor_time, round_ms, threads_s
from bench.harness.traffic import Run, Way, connected, request, run
from bench.results import Result, at_most, say, spread
from core.records import EngineStats
from deploy.launch import served
from deploy.settings import demo_config

NUM_RUNS = {1: 5, 16: 3}
"""Number of runs, by number of streams."""
MAX_TOKENS = 128
GAMMA = 4
PROMPT = "import os\nimport sys\n\n\ndef read_lines(path):\n"
STEP_GOAL_MS = 1.5
VERDICT_GOAL_MS = 0.5
ENGINES = {"TargetActor": "target", "DraftActor": "draft"}
"""Roles of the engines, by name of the process."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Work of an engine during a run, in seconds."""

    forward_s: float
    step_s: float
    thread_s: float
    """Processor time of the thread that computes the steps."""

    @property
    def forward_cpu_s(self) -> float:
        """Processor time of the forward passes, at most their duration."""
        return min(self.forward_s, self.thread_s * self.forward_s / self.step_s) if self.step_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Counters of an engine at one time."""

    stats: EngineStats
    threads: Mapping[int, float]

    def until(self, later: EngineReading) -> EngineWork:
        """Work between this reading and a later one."""
        return EngineWork(
            later.stats.forward_time_s - self.stats.forward_time_s,
            later.stats.step_time_s - self.stats.step_time_s,
            busiest_s(self.threads, later.threads),
        )


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """One run of all streams together."""

    wall_s: float
    """Seconds from the call of the first stream to the end of the last."""
    forward_s: float
    """Seconds of forward passes of both engines."""
    step_s: float
    """Seconds of steps of both engines."""
    cpu_ms: Mapping[str, float]
    """Processor time of a round in milliseconds, by process, without forward passes."""
    num_rounds: float
    """Number of rounds per stream, on average."""
    num_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no settings."""


def measure(args: argparse.Namespace) -> list[Result]:  # noqa: ARG001
    """Serve the demo pair and measure it."""
    with served(demo_config(), say) as endpoints:
        return asyncio.run(_measure(f"localhost:{endpoints.grpc_port}"))


async def _measure(address: str) -> list[Result]:
    engines = {process: await engine_of(role) for process, role in ENGINES.items()}
    samples: dict[tuple[int, int], list[OverheadSample]] = {}
    traced: list[Run] = []
    async with connected(address) as stub:
        for num_streams, num_runs in NUM_RUNS.items():
            for number in range(num_runs + 1):
                for gamma in (GAMMA, 0):
                    sample = await _run(stub, engines, gamma, num_streams)
                    if number > 0:  # the first run of each kind is a warm-up
                        samples.setdefault((gamma, num_streams), []).append(sample)
                if num_streams == 1:
                    traced.append(await _stream(stub, GAMMA, number, trace=True))
    return [
        verdict_to_next("drafted x1", [round_ for each in traced for round_ in rounds_of(each.calls)]),
        *(result for case, of_case in samples.items() for result in _results(*case, of_case)),
        *_ratios(samples),
    ]


async def _run(stub: Any, engines: Mapping[str, Any], gamma: int, num_streams: int) -> OverheadSample:
    before, cpu_before = await _readings(engines), cpu_s()
    streams = await asyncio.gather(*(_stream(stub, gamma, seed) for seed in range(num_streams)))
    cpu_after, after = cpu_s(), await _readings(engines)
    work = {process: before[process].until(after[process]) for process in engines}
    num_rounds = sum(each.stats.target_passes for each in streams)
    return OverheadSample(
        wall_s=max(each.arrivals[-1].at_s for each in streams) - min(each.began_s for each in streams),
        forward_s=sum(each.forward_s for each in work.values()),
        step_s=sum(each.step_s for each in work.values()),
        cpu_ms=beside_models(round_ms(cpu_before, cpu_after, num_rounds), work, num_rounds),
        num_rounds=num_rounds / num_streams,
        num_tokens=MAX_TOKENS * num_streams,
    )


async def _readings(engines: Mapping[str, Any]) -> dict[str, EngineReading]:
    return {
        process: EngineReading(await engine.stats.remote(), threads_s(process)) for process, engine in engines.items()
    }


async def _stream(stub: Any, gamma: int, seed: int, *, trace: bool = False) -> Run:
    return await run(stub, request(PROMPT, MAX_TOKENS, temperature=0.8, way=Way(gamma), seed=seed, trace=trace))


def beside_models(cpu_ms: Mapping[str, float], work: Mapping[str, EngineWork], num_rounds: float) -> dict[str, float]:
    """Processor time of a round in milliseconds, by process, without forward passes."""
    passes_ms = round_ms({}, {process: each.forward_cpu_s for process, each in work.items()}, num_rounds)
    return {process: spent - passes_ms.get(process, 0.0) for process, spent in cpu_ms.items()}


def verdict_to_next(name: str, rounds: Sequence[Round]) -> Result:
    """Median milliseconds from a verdict to the next verification, over rounds that are hits."""
    hits = [{"orchestrator": round_.waited_s, "link": round_.link_s} for round_ in rounds if round_.is_hit]
    counts = {"hits": len(hits), "rounds": len(rounds)}
    if not hits:
        return at_most(VERDICT_GOAL_MS, Result(f"{name}: verdict to next verify", math.nan, "ms", settings=counts))
    times_ms = [1e3 * sum(hit.values()) for hit in hits]
    settings = {**counts, "p90_ms": round(float(np.quantile(times_ms, 0.9)), 3), **medians_ms(hits)}
    result = Result(f"{name}: verdict to next verify", round(statistics.median(times_ms), 3), "ms", settings=settings)
    return at_most(VERDICT_GOAL_MS, result)


def _results(gamma: int, num_streams: int, samples: Sequence[OverheadSample]) -> list[Result]:
    settings = {"gamma": gamma, "streams": num_streams, "max_tokens": MAX_TOKENS}
    name = f"{'drafted' if gamma else 'plain'} x{num_streams}"
    totals = [
        spread(f"{name}: a round", [s.wall_s / s.num_rounds * 1e3 for s in samples], "ms", **settings),
        spread(f"{name}: tokens a round", [s.num_tokens / num_streams / s.num_rounds for s in samples], "tokens"),
    ]
    if num_streams > 1:
        return totals
    cpu = processor_time(f"{name}: processor time of a round", [s.cpu_ms for s in samples])
    outside = [] if gamma else _outside_models(name, samples)
    return [*totals, *outside, at_most(PROCESSOR_GOAL_MS, cpu)]


def _outside_models(name: str, samples: Sequence[OverheadSample]) -> list[Result]:
    """Parts of a plain round, which are sequential: nothing is hidden."""
    parts_ms = {
        "forward passes": [s.forward_s / s.num_rounds * 1e3 for s in samples],
        "sampling and bookkeeping": [(s.step_s - s.forward_s) / s.num_rounds * 1e3 for s in samples],
        "Ray, orchestration, gRPC": [(s.wall_s - s.step_s) / s.num_rounds * 1e3 for s in samples],
    }
    other_ms = [(s.wall_s - s.forward_s) / s.num_rounds * 1e3 for s in samples]
    return [
        *(spread(f"{name}: {part}", values, "ms") for part, values in parts_ms.items()),
        at_most(STEP_GOAL_MS, spread(f"{name}: all that is not model time", other_ms, "ms")),
    ]


def _ratios(samples: dict[tuple[int, int], list[OverheadSample]]) -> list[Result]:
    """Plain time over drafted time, by pairs of consecutive runs."""
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
