"""The duration of a bare actor call, the unit for everything in a round except computing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ray


class Echo:
    """The shortest possible actor call; asynchronous and without event reports, like the engines' actors."""

    async def echo(self, message: object) -> object:
        return message


async def round_trips_ms(num_calls: int) -> list[float]:
    """Milliseconds of bare actor calls in the connected cluster, one after the other."""
    actor: Any = ray.remote(num_cpus=0, enable_task_events=False)(Echo).remote()
    await actor.echo.remote(None)  # wait until it has started
    times = await timed_ms(partial(actor.echo.remote, None), num_calls)
    ray.kill(actor)
    return times


async def timed_ms(call: Callable[[], Awaitable[object]], num_calls: int) -> list[float]:
    """Milliseconds of each call, one after the other."""
    times = []
    for _ in range(num_calls):
        started_s = time.monotonic()
        await call()
        times.append((time.monotonic() - started_s) * 1e3)
    return times
