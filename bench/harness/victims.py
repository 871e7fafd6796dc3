"""Kills and stops processes of the running cluster, and waits for Serve's replacements.

Knows Serve's replicas and the engines' processes; must not know streams.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray._private.state import actors
from ray.exceptions import RayError
from ray.util import list_named_actors

from bench.harness.probe import engine_of, engines_of
from deploy.app import APPLICATION
from deploy.engines import DraftActor, TargetActor

SERVE_NAMESPACE = "serve"
REPLACEMENT_TIMEOUT_S = 120.0
POLL_S = 0.1


def replicas(role: str) -> set[str]:
    """Names of the live replicas' actors of a deployment: target, draft or orchestrator."""
    found = list_named_actors(all_namespaces=True)
    return {each["name"] for each in found if f"{APPLICATION}#{role}#" in each["name"]}


async def engine_pid(role: str) -> int:
    """Process id of one engine of `role`."""
    return await _pid_of(await engine_of(role))


def engine_pids(role: str) -> list[int]:
    """Process ids of all engines of `role`, including engines that are loading."""
    kind = {"target": TargetActor, "draft": DraftActor}[role].__name__
    found = actors().values()
    return [each["Pid"] for each in found if each["ActorClassName"] == kind and each["State"] == "ALIVE"]


async def kill_engine(role: str) -> None:
    """Kill (SIGKILL) the engine of `role` with the most sessions. `probe.engine_of` would find the one with the
    fewest."""
    engines = await engines_of(role, len(replicas(role)))
    stats = await asyncio.gather(*(engine.stats.remote() for engine in engines))
    busiest = max(range(len(engines)), key=lambda index: stats[index].num_sessions)
    os.kill(await _pid_of(engines[busiest]), signal.SIGKILL)


async def _pid_of(engine: Any) -> int:
    pid: int = await engine.__ray_call__.remote(lambda _: os.getpid())
    return pid


async def kill_replica(role: str, chooser: random.Random) -> None:
    """Kill one random replica of `role` without draining its requests."""
    name = chooser.choice(sorted(replicas(role)))
    ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))


async def serving(role: str) -> set[str]:
    """Names of all orchestrators, or ids of all engines of `role`. Raises: RuntimeError unless all of them serve."""
    names = replicas(role)
    states = serve.status().applications[APPLICATION].deployments[role].replica_states
    if not len(names) == states.get("RUNNING", 0) == sum(states.values()):
        raise RuntimeError(f"of {role} there are {dict(states)}")
    if role == "orchestrator":
        return names
    return {engine._actor_id.hex() for engine in await engines_of(role, len(names))}


async def until_replaced(role: str, before: set[str], since_s: float) -> float:
    """Seconds from `since_s` until the replacement serves and the number is that of `before`. Raises: TimeoutError."""
    while not await _is_replaced(role, before):
        if time.monotonic() > since_s + REPLACEMENT_TIMEOUT_S:
            raise TimeoutError(f"no {role} came in the place of one of {sorted(before)}")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - since_s


async def _is_replaced(role: str, before: set[str]) -> bool:
    try:
        now = await serving(role)
    except (RuntimeError, RayError):  # also if a replica has just died
        return False
    return now != before and len(now) == len(before)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process (SIGSTOP) inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
