"""Savings of a link over actor calls: the demo pair served both ways at once, in one cluster, run by run in turn.

Each way is a model of one fleet with its own engines. Orchestrator, proxy and client are shared, and other load affects
both ways alike. Runs alternate, and ratios are of neighbouring runs. Processor time is that of all processes of the
cluster, by name.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from ray import serve

from bench.harness.processor import cpu_s, processor_time, round_ms
from bench.harness.traffic import AS_SERVED, PLAINLY, Run, Way, connected, request, run
from bench.results import Result, spread
from core.config import FleetConfig
from deploy.app import APPLICATION, build, resources
from deploy.launch import local_cluster
from deploy.settings import DEMO_SETTINGS, parse_fleet
from outrider_client import Client
from protos.outrider.v1 import generation_pb2 as pb

PROMPT = "import os\nimport sys\n\n\ndef read_lines(path):\n"
TOKENS = 96
LINK, CALLS = "link", "actor calls"
PORTS: Mapping[str, list[int] | None] = {LINK: [20200, 20299], CALLS: None}
WAYS = {"plain": PLAINLY, "drafted": AS_SERVED}


@dataclass(frozen=True, slots=True)
class LinkSample:
    round_ms: float
    outside_ms: float
    """Milliseconds of a round in which the target neither computes nor queues the request."""
    cpu_ms: Mapping[str, float]
    """Processor time of a round in milliseconds, by process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=7)


def measure(args: argparse.Namespace) -> list[Result]:
    """Serve the demo pair in both ways, and compare them."""
    fleet = _fleet()
    with local_cluster(ceil(resources(fleet)["CPU"])) as endpoints:
        serve.run(build(fleet), name=APPLICATION, route_prefix="/")
        address = f"localhost:{endpoints.grpc_port}"
        with Client(address) as client:
            client.wait_until_serving(120.0)
        return asyncio.run(_measure(address, args.repeats))


def _fleet() -> FleetConfig:
    models = [{**DEMO_SETTINGS, "model_name": name} for name in PORTS]
    for model, ports in zip(models, PORTS.values(), strict=True):
        for role in ("target", "draft"):
            model[role] = {"engine": {**model[role]["engine"], "link_ports": ports}}
    return parse_fleet({"models": models})


async def _measure(address: str, num_repeats: int) -> list[Result]:
    samples: dict[tuple[str, str], list[LinkSample]] = {(name, way): [] for way in WAYS for name in PORTS}
    async with connected(address) as stub:
        for repeat in range(num_repeats + 1):
            for name, way in samples:
                sample = await _sample(stub, name, WAYS[way], repeat)
                if repeat:  # the first of each is a warm-up
                    samples[name, way].append(sample)
    return [result for way in WAYS for result in _results(way, {name: samples[name, way] for name in PORTS})]


async def _sample(stub: Any, model: str, way: Way, seed: int) -> LinkSample:
    message = request(PROMPT, TOKENS, temperature=0.8, way=way, seed=seed, trace=True)
    message.model = model
    before = cpu_s()
    stream = await run(stub, message)
    after = cpu_s()
    num_rounds = stream.stats.target_passes
    return LinkSample(
        stream.decode_s * 1e3 / num_rounds,
        _outside_ms(stream),
        round_ms(before, after, num_rounds),
    )


def _outside_ms(stream: Run) -> float:
    """Median milliseconds from one verdict to the next, without the time that the engine reports for the
    verification."""
    verified = [call for call in stream.calls if call.HasField("timing") and call.call == pb.CALL_VERIFY]
    return 1e3 * statistics.median(
        after.received_s - before.received_s - after.timing.waited_s - after.timing.computed_s
        for before, after in pairwise(verified)
    )


def _results(way: str, samples: Mapping[str, Sequence[LinkSample]]) -> list[Result]:
    results = []
    for name, of_name in samples.items():
        results += [
            spread(f"{way}, {name}: a round", [each.round_ms for each in of_name], "ms"),
            spread(f"{way}, {name}: outside the target's passes", [each.outside_ms for each in of_name], "ms"),
            processor_time(f"{way}, {name}: processor time a round", [each.cpu_ms for each in of_name]),
        ]
    for name in list(samples)[:-1]:
        pairs = list(zip(samples[CALLS], samples[name], strict=True))
        results.append(
            spread(f"{way}: {CALLS} over {name}", [calls.round_ms / link.round_ms for calls, link in pairs], "x")
        )
    return results
