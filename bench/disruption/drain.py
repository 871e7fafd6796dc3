"""A node that has to stop, as in a pod's preStop hook: the delay until its health says so, and the effect on streams.

Two hosts (bench/harness/hosts.py), each with its own gRPC proxy as on Kubernetes. The near host has the models and an
orchestrator, the far host the other orchestrator. A stream runs through the far host while it is drained by
`ray drain-node`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.hosts import Host, missing, two_hosts
from bench.harness.nodes import Nodes, manifest, nodes, num_running, until
from bench.harness.traffic import AS_SERVED, PLAINLY, Run, Way, connected, request, run
from bench.models.prompts import held_out_prompts
from bench.results import Result, at_least, at_most, say, spread
from core.errors import StartupError
from deploy.files import STOP_FILE
from deploy.settings import override

NEAR = {"near": 1.0}
MAX_TOKENS = 400
TEMPERATURE = 0.8
POLL_S = 0.01
SAID_GOAL_S = 1.0
UNTIL_SAID_S = 30.0
DEADLINE_S = 600
"""Longer than Serve's graceful shutdown; otherwise Serve would not wait for replacements."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="with the file that the hook leaves, and without it")


def measure(args: argparse.Namespace) -> list[Result]:
    """Repeatedly add a node on the far host and drain it while it has a stream. Raises: StartupError."""
    if (lack := missing()) is not None:
        raise StartupError(f"two hosts cannot be had here: {lack}")
    with (
        tempfile.TemporaryDirectory() as folder,
        two_hosts() as (near, far, _),
        nodes([], near.address, num_cpus=4, resources=NEAR) as up,
    ):
        return asyncio.run(_measure(up, near, far, args.repeats, Path(folder)))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for processes that are started inside the block."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def settings() -> dict[str, Any]:
    """Settings with the demo pair on the near host and one orchestrator on each; there is no room for more."""
    changed = override(
        manifest()["applications"][0]["args"], ["orchestrator.num_replicas=2", "orchestrator.num_cpus=2"]
    )
    changed["orchestrator"]["labels"] = {}
    for role in ("target", "draft"):
        changed[role] |= {"num_cpus": 0.5, "labels": {}, "resources": {"near": 0.1}}
    return changed


async def _measure(up: Nodes, near: Host, far: Host, num_repeats: int, folder: Path) -> list[Result]:
    said_s: dict[bool, list[float]] = {}
    unlike, num_under_way, expected = 0, 0, None
    for number, has_file in enumerate([True, False] * num_repeats):
        say(f"drain {number + 1} of {2 * num_repeats}")
        stop_file = folder / str(number)
        with _environment(STOP_FILE, str(stop_file)):
            far.enter()
            node = up.add("orchestrator", node_ip_address=far.address)
            near.enter()
        if number == 0:
            await asyncio.to_thread(up.deploy, settings(), "EveryNode")
        await until(lambda: num_running("orchestrator") == 2, UNTIL_SAID_S * 4)
        async with connected(f"{far.address}:{up.grpc_port}") as stub:
            await _until_health(far, up, health_pb2.HealthCheckResponse.SERVING)
            expected = expected or await _stream(stub, PLAINLY)
            streaming = asyncio.create_task(_stream(stub))
            await asyncio.sleep(0.5)
            began_s = time.monotonic()
            hook = asyncio.create_task(asyncio.to_thread(_drain, up, node.node_id, stop_file if has_file else None))
            await _until_health(far, up, health_pb2.HealthCheckResponse.NOT_SERVING)
            said_s.setdefault(has_file, []).append(time.monotonic() - began_s)
            num_under_way += not streaming.done()
            await hook
            try:
                unlike += (await streaming).tokens != expected.tokens
            except grpc.aio.AioRpcError as error:
                unlike += 1
                say(f"the stream failed: {error.details()}")
        say(f"said after {said_s[has_file][-1]:.2f} s")
        up.cluster.remove_node(node)
    return [
        at_most(SAID_GOAL_S, spread("from the hook's beginning to NOT_SERVING", said_s[True], "s")),
        spread("the same by `ray drain-node` alone", said_s[False], "s"),
        at_least(2 * num_repeats, Result("streams that were under way when it was said", num_under_way, "streams")),
        at_most(0, Result("streams through the node that failed or changed", unlike, "streams")),
    ]


async def _stream(stub: Any, way: Way = AS_SERVED) -> Run:
    prompt = held_out_prompts(1)[0]
    return await run(stub, request(prompt, MAX_TOKENS, temperature=TEMPERATURE, way=way, seed=1))


def _drain(up: Nodes, node_id: str, stop_file: Path | None) -> None:
    """Run the drain as the manifests' hook does, in a process of its own."""
    if stop_file is not None:
        stop_file.touch()
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", up.cluster.address]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is to stop"]
    deadline = ["--deadline-remaining-seconds", str(DEADLINE_S)]
    subprocess.run([*command, "--node-id", node_id, *reason, *deadline], check=True, capture_output=True)


async def _until_health(far: Host, up: Nodes, status: int) -> None:
    """Wait for this health status. Raises: TimeoutError."""
    end_s = time.monotonic() + UNTIL_SAID_S
    async with grpc.aio.insecure_channel(f"{far.address}:{up.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < end_s:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            except grpc.aio.AioRpcError:
                pass  # the proxy has not started yet
            else:
                if answer.status == status:
                    return
            await asyncio.sleep(POLL_S)
    raise TimeoutError(f"health was not {status} within {UNTIL_SAID_S:g} s")
