"""Several Outriders on one local cluster, so that they can be measured in turn, call by call, at the same moment.

Knows Serve and how an application is built; must not know what is measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any

import ray
from ray import serve

from core.config import ServiceConfig
from deploy import app, launch
from deploy.cluster import local_cluster


@contextmanager
def applications(configs: Mapping[str, ServiceConfig], report: Callable[[str], None]) -> Iterator[str]:
    """Serve each configuration as the application of its name; the address of their gRPC proxy.

    A call names its application in the metadata. Those that are not called do nothing but answer health checks.
    Raises: StartupError.
    """
    for config in configs.values():
        launch.check_pair(config)
    num_cpus = ceil(sum(app.resources(config)["CPU"] for config in configs.values()))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with local_cluster(num_cpus) as endpoints:
        for name, config in configs.items():
            report(f"starting {name}")
            serve.run(app.build(config), name=name, route_prefix=f"/{name}")
        yield f"localhost:{endpoints.grpc_port}"


class Echo:
    """The least that an actor call can be: the engines' actors are asynchronous, too."""

    async def echo(self, message: object) -> object:
        return message


async def round_trips_ms(num_calls: int) -> list[float]:
    """Milliseconds of bare actor calls on the cluster that this process is connected to, one after the other."""
    actor: Any = ray.remote(num_cpus=0)(Echo).remote()
    await actor.echo.remote(None)  # it has started
    times = []
    for _ in range(num_calls):
        started_s = time.monotonic()
        await actor.echo.remote(None)
        times.append((time.monotonic() - started_s) * 1e3)
    ray.kill(actor)
    return times
