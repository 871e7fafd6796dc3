"""Several nodes under load: autoscaling up and down, rolling updates, nodes that die and are replaced.

Head, orchestrator, draft and target nodes are Ray nodes of this machine with different labels. The application is
deployed over REST, as KubeRay does it. Every stream is compared with plain decoding of the same request.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness.load import Expected, SteadyLoad, Tally
from bench.harness.nodes import ROLES, Nodes, manifest, nodes, num_running, only_running, until
from bench.harness.traffic import PLAINLY, connected, numbered, run, temperature_of
from bench.models.prompts import held_out_prompts
from bench.results import Result, at_least, at_most, say, spread
from core.config import DraftScaling, OrchestratorScaling, TargetScaling
from deploy.settings import override
from outrider_client import AsyncClient
from simulation.report import NUM_SCALING_AXES, Moment, draw_scaling, drawing

MAX_TOKENS = 128
NUM_STREAMS = 4
"""Number of streams while nodes are killed and updates roll."""
LEVELS = (1, 12, 1)
"""Numbers of streams, one level after the other: the load rises and falls."""
SAMPLE_PERIOD_S = 1.0
REPLICAS = {"orchestrator": 2, "draft": 1, "target": 2}
"""Number of replicas while nodes die and updates roll."""
UPDATE_TIMEOUT_S = 180.0
NOTICE_TIMEOUT_S = 60.0
"""Longest time until Serve notices that a node has died, in seconds."""
SCALING: Mapping[str, Any] = {
    "orchestrator": OrchestratorScaling(
        max_replicas=2, sessions=8, upscale_delay_s=2, downscale_delay_s=20, window_s=11
    ),
    "target": TargetScaling(max_replicas=3, sessions=4, upscale_delay_s=2, downscale_delay_s=20, window_s=11),
    "draft": DraftScaling(
        min_replicas=0, max_replicas=2, busy=0.3, upscale_delay_s=2, downscale_delay_s=20, window_s=11
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of a node of each role")
    parser.add_argument("--updates", type=int, default=10, metavar="N", help="of draft and target")
    parser.add_argument(
        "--level-s", type=float, default=60.0, help="how long each level of load lasts; 0 leaves it out"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw replicas over time")


def measure(args: argparse.Namespace) -> list[Result]:
    """Start the nodes and run all parts."""
    with nodes() as up:
        up.deploy(settings())
        return asyncio.run(_measure(up, args))


def settings(**deployments: Any) -> dict[str, Any]:
    """The demo manifest's settings, with each deployment on nodes of its role and with the given changes by name."""
    changed = override(manifest()["applications"][0]["args"], ["limits.drain_grace_s=2"])
    for role, more in deployments.items():
        changed[role] = {**changed[role], **more}
    return changed


async def _measure(up: Nodes, args: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    for role in ("orchestrator", "draft", "target", "target"):  # the second target allows scaling and updates
        up.add(role)
    async with connected(up.address) as stub:
        jobs = [await _expected(stub, prompt, index) for index, prompt in enumerate(held_out_prompts(NUM_STREAMS))]
    if args.level_s:
        results += await _ramp(up, jobs, args)
    await _deploy(up, _version(1))
    if args.updates:
        results += await _update(up, jobs, args.updates)
    for role in ROLES if args.kills else ():
        results += await _kill(up, jobs, role, args.kills)
    return results


async def _expected(stub: Any, prompt: str, index: int) -> Expected:
    plain = await run(stub, numbered(prompt, MAX_TOKENS, index, PLAINLY))
    return Expected(prompt, index, temperature_of(index), plain.tokens)


@asynccontextmanager
async def _load(up: Nodes, jobs: Sequence[Expected]) -> AsyncIterator[SteadyLoad]:
    async with AsyncClient(up.address) as client, SteadyLoad(client, jobs) as load:
        load.keep(NUM_STREAMS)
        yield load


async def _deploy(up: Nodes, changed: Mapping[str, Any]) -> None:
    await asyncio.to_thread(up.deploy, changed)


# Replicas follow load


async def _ramp(up: Nodes, jobs: Sequence[Expected], args: argparse.Namespace) -> list[Result]:
    await _deploy(up, settings(**{role: {"autoscaling": asdict(scaling)} for role, scaling in SCALING.items()}))
    samples: list[Moment] = []
    async with _load(up, jobs) as load:
        for level in LEVELS:
            say(f"{level} streams")
            load.keep(level)
            samples += await _watch(load, args.level_s)
    say("no streams")
    samples += await _watch(load, args.level_s)
    if args.svg:
        with drawing(args.svg, NUM_SCALING_AXES, 1, (8, 6)) as rows:
            draw_scaling([axes for (axes,) in rows], samples)
    return [*_counts(samples), *_tallied("load rises and falls", load.tally)]


async def _watch(load: SteadyLoad, duration_s: float) -> list[Moment]:
    samples = []
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        counts = await asyncio.to_thread(lambda: {role: num_running(role) for role in ROLES})
        samples.append(Moment(time.monotonic(), load.num_running, counts))
        await asyncio.sleep(SAMPLE_PERIOD_S)
    return samples


def _counts(samples: Sequence[Moment]) -> list[Result]:
    results = []
    for role in ROLES:
        counts = [sample.num_replicas[role] for sample in samples]
        name = f"load rises and falls: {role}"
        results.append(at_least(2, Result(f"{name}, most replicas", max(counts), "replicas")))
        least = SCALING[role].min_replicas
        results.append(at_most(least, Result(f"{name}, replicas at the end", counts[-1], "replicas")))
    return results


# Updates and deaths


async def _update(up: Nodes, jobs: Sequence[Expected], num_updates: int) -> list[Result]:
    """Change draft and target back and forth, in settings that change no token."""
    times_s = []
    async with _load(up, jobs) as load:
        for number in range(num_updates):
            say(f"update {number + 1} of {num_updates}")
            began_s = time.monotonic()
            await _deploy(up, _version(number))
            await until(lambda: only_running(REPLICAS), UPDATE_TIMEOUT_S)
            times_s.append(time.monotonic() - began_s)
    took = spread(f"{num_updates} rolling updates: until the last old replica has gone", times_s, "s")
    return [*_tallied(f"{num_updates} rolling updates", load.tally), took]


def _version(number: int) -> dict[str, Any]:
    cpus = 0.5 + 0.25 * (number % 2)
    return settings(**{role: {"num_replicas": count, "num_cpus": cpus} for role, count in REPLICAS.items()})


async def _kill(up: Nodes, jobs: Sequence[Expected], role: str, num_kills: int) -> list[Result]:
    times_s = []
    async with _load(up, jobs) as load:
        up.add(role)  # a spare node for the replacement; each node that dies is replaced by another
        for number in range(num_kills):
            say(f"{role} node: death {number + 1} of {num_kills}")
            began_s = time.monotonic()
            await asyncio.to_thread(up.kill, role)
            await until(lambda: not only_running(REPLICAS), NOTICE_TIMEOUT_S)
            up.add(role)  # Ray can start a node only in the main thread
            await until(lambda: only_running(REPLICAS), UPDATE_TIMEOUT_S)
            times_s.append(time.monotonic() - began_s)
    took = spread(f"{role} node killed {num_kills} times: until all replicas run again", times_s, "s")
    return [*_tallied(f"{role} node killed {num_kills} times", load.tally), took]


def _tallied(title: str, tally: Tally) -> list[Result]:
    for failure in tally.failures:
        say(f"failed: {failure}")
    say(f"{title}: {tally.num_done} streams, {len(tally.failures)} failed, {tally.num_wrong} unlike plain decoding")
    counts = {"streams": tally.num_done, "resumed by the client": tally.num_resumed}
    return [
        at_most(0, Result(f"{title}: failed streams", len(tally.failures), "streams", settings=counts)),
        at_most(0, Result(f"{title}: streams unlike plain decoding", tally.num_wrong, "streams")),
    ]
