"""A Ray cluster with Serve on this machine, which lives as long as a block of code.

Knows how Ray and Serve are started and stopped; must not know what is deployed on them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from math import ceil
from random import SystemRandom
from typing import Any

import ray
from ray import serve
from ray._common.network_utils import build_address
from ray._private import worker as ray_worker

from core.errors import StartupError, first_line
from deploy.grpc import GRPC_HOST

SERVICERS = ("deploy.grpc.proxy.add_generation_service", "deploy.grpc.proxy.add_health_service")
"""The services of Serve's gRPC proxy; Kubernetes manifests name the same."""
HOST = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Range of a proxy's port. Ray opens dozens of ports before Serve listens: those of its workers lie below this range,
those that the kernel chooses above it."""
PREPARE = "deploy.proxy.prepare"
"""Function that Serve's proxies call when they start."""
OBJECT_STORE_BYTES = 128 * 2**20
"""Ray's default is a third of the memory; requests and replies are far too small to need the store."""
MAX_MESSAGE_BYTES = 8 * 2**20
"""Longest message of Serve's gRPC proxy, in bytes; its default is 2 GiB. A service's own limit
(`limits.max_message_bytes`) may be lower, and its error names the field."""
NODE_ENVIRONMENT: Mapping[str, str] = {
    # Ray sets its niceness of 15 only when a process is connected. Until then a starting process would have 28 times
    # the scheduling weight of the processes that serve (docs/adr/deployment).
    "RAY_worker_niceness": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PREPARE,
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(MAX_MESSAGE_BYTES),
    # Proxies call replicas by gRPC, and a replica has one event loop. Ray's streams, with a second thread for Serve,
    # would take 1.5 times as much processor time for each chunk (docs/adr/edge).
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2 * MAX_MESSAGE_BYTES),  # a call adds a header to its message
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment of a node, which Ray and Serve read at their start; every container of a Kubernetes manifest has it."""
PROXY_START_S = "60"
"""Seconds that a proxy may take to start. Serve's default is 5 s, after which Serve kills it and fails: too short for a
busy machine."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a local cluster."""

    host: str
    """The address that the proxies of gRPC and HTTP listen on; 0.0.0.0 for all."""
    grpc_port: int
    http_port: int
    metrics_port: int = 0
    """The port of this node's metrics for Prometheus."""

    @property
    def grpc(self) -> str:
        """Address of gRPC for a client on this machine."""
        host = ip_address(self.host)
        if host.is_unspecified or host.is_loopback:
            return f"localhost:{self.grpc_port}"
        address: str = build_address(self.host, self.grpc_port)
        return address


@contextmanager
def local_cluster(
    num_cpus: float,
    *,
    resources: Mapping[str, float] | None = None,
    host: str = HOST,
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
) -> Iterator[Endpoints]:
    """Run Ray and Serve, with `num_cpus` logical CPUs whatever the machine has; port 0 takes a free one.

    At the end of the block all of it is stopped at once, with its running streams; other clusters are not touched.
    Raises: StartupError when Ray or Serve does not start; RuntimeError when this process is connected to a cluster.
    """
    free = _free_ports()
    endpoints = Endpoints(host, grpc_port or next(free), http_port or next(free))
    if ray.is_initialized():
        raise RuntimeError("this process is already connected to a Ray cluster: call ray.shutdown() first")
    prepare_environment()
    os.environ[GRPC_HOST] = host
    _shorten_advice()
    try:
        with _as_startup_error():
            _start_ray(num_cpus, resources or {}, metrics_port)
            _start_serve(endpoints)
        yield replace(endpoints, metrics_port=ray.nodes()[0]["MetricsExportPort"])
    finally:
        os.environ.pop(GRPC_HOST, None)  # it applies to this cluster only
        ray.shutdown()


@contextmanager
def _as_startup_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray also raises Exception itself
        raise StartupError(f"Ray Serve could not be started on this machine: {first_line(error)}") from error


def _start_ray(num_cpus: float, resources: Mapping[str, float], metrics_port: int) -> None:
    ray.init(
        address="local",
        num_cpus=ceil(num_cpus),  # a node has whole resources; an actor may ask for a part of one
        resources={name: ceil(amount) for name, amount in resources.items()},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        namespace="outrider",
        _metrics_export_port=metrics_port or None,
    )


def _start_serve(endpoints: Endpoints) -> None:
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": endpoints.host, "port": endpoints.http_port},
        grpc_options={
            "port": endpoints.grpc_port,
            "grpc_servicer_functions": list(SERVICERS),
            "enable_reflection": True,
        },
    )


def prepare_environment() -> None:
    """Set the environment of nodes that this process starts: `NODE_ENVIRONMENT`, no usage reports, and a token.

    Ray requires the token for running code on the cluster. Without one it would write its own to the home directory.
    RAY_AUTH_MODE cannot be set here, because Ray reads it when it is imported.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", PROXY_START_S)
    for name, value in NODE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it warns that authentication is on


def _shorten_advice() -> None:
    """Shorten Ray's message about a dead process, which is a kilobyte of advice on memory, to one line."""
    if not isinstance(ray_worker.print_to_stdstream, partial):
        ray_worker.print_to_stdstream = partial(_print_shortened, ray_worker.print_to_stdstream)


def _print_shortened(print_lines: Callable[..., None], data: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    print_lines({**data, "lines": [without_advice(message) for message in data["lines"]]}, *args, **kwargs)


def without_advice(message: str) -> str:
    """A message of Ray (2.60) for the terminal, shortened if it is about a dead process."""
    process = re.search(r"Worker PID: (\d+)", message)
    if process is None or not message.startswith("A worker died or was killed"):
        return message
    return f"process {process[1]} has died; the files in logs/serve of Ray's session folder say which replica it was"


def _free_ports() -> Iterator[int]:
    """Free ports out of `PORTS`, each once. Raises: StartupError when there is none left."""
    for port in SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        yield port
    raise StartupError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {HOST}")
