"""Kills and stops processes of the cluster that this process has started, and waits for what Serve puts in their place.

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
from ray.util import list_named_actors

from deploy.app import APPLICATION
from deploy.probe import engine_of, engines_of

SERVE_NAMESPACE = "serve"
REPLACEMENT_TIMEOUT_S = 120.0
POLL_S = 0.1


def replicas(role: str) -> set[str]:
    """The names of the replicas' actors of target, draft or orchestrator that are alive."""
    found = list_named_actors(all_namespaces=True)
    return {each["name"] for each in found if f"{APPLICATION}#{role}#" in each["name"]}


async def engine_pid(role: str) -> int:
    """The process of one engine of `role`."""
    return await _pid_of(await engine_of(role))


async def kill_engine(role: str) -> None:
    """SIGKILL to the engine of `role` that most sessions are on: a probe would be led to the one that has fewest."""
    engines = await engines_of(role, len(replicas(role)))
    stats = await asyncio.gather(*(engine.stats.remote() for engine in engines))
    busiest = max(range(len(engines)), key=lambda index: stats[index].num_sessions)
    os.kill(await _pid_of(engines[busiest]), signal.SIGKILL)


async def _pid_of(engine: Any) -> int:
    pid: int = await engine.__ray_call__.remote(lambda _: os.getpid())
    return pid


async def kill_replica(role: str, chooser: random.Random) -> None:
    """End one replica of `role` at once, with whatever it was serving."""
    name = chooser.choice(sorted(replicas(role)))
    ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))


async def until_replaced(role: str, before: set[str], since_s: float) -> float:
    """Seconds from `since_s` until as many replicas run as `before`, one of them new. Raises: TimeoutError."""
    while not _is_replaced(role, before):
        if time.monotonic() > since_s + REPLACEMENT_TIMEOUT_S:
            raise TimeoutError(f"no replica of {role} came in the place of one of {sorted(before)}")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - since_s


def _is_replaced(role: str, before: set[str]) -> bool:
    now = replicas(role)
    states = serve.status().applications[APPLICATION].deployments[role].replica_states
    return now != before and len(now) == len(before) == states.get("RUNNING", 0) == sum(states.values())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still (SIGSTOP) while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
