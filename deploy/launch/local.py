"""Runs the whole service on this machine for the length of a `with` block, on a Ray cluster of its own.

Knows the order of the start and the messages about it; `deploy.app` defines the application.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import ceil
from typing import TypeVar

from core.config import EngineConfig, FleetConfig, ServiceConfig, WorkerConfig
from core.errors import ConfigError, StartupError, Unavailable
from deploy import app
from deploy.launch import application
from deploy.launch.cluster import HOST, Endpoints, local_cluster
from deploy.settings import flat, single_models
from outrider_client import Client, DeadlinePassed

READY_TIMEOUT_S = 60.0
"""Longest time from the end of loading to the first answer through the proxy, in seconds."""
DRAIN_PERIOD_S = 0.2
FLUSH_S = 0.5
"""Time that Serve's proxy gets to send the last chunks, in seconds."""
Worker = TypeVar("Worker", bound=WorkerConfig)
BUILT_IN_RESOURCES = ("CPU", "GPU")
"""Resources that Ray counts by itself."""


@contextmanager
def served(
    config: ServiceConfig | FleetConfig,
    report: Callable[[str], None],
    *,
    host: str = HOST,
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
    engines: app.Engines = app.ENGINES,
) -> Iterator[Endpoints]:
    """Serve `config` until the block ends; port 0 takes a free one. `report` gets a line for each stage of the start.

    Raises: StartupError.
    """
    fleet = app.as_fleet(config)
    application.check_fleet(fleet)
    for setting, port in (("--grpc-port", grpc_port), ("--http-port", http_port), ("--metrics-port", metrics_port)):
        _check_free(setting, port)
    fleet = _without_labels(fleet)
    needed = app.resources(fleet)
    custom = {name: amount for name, amount in needed.items() if name not in BUILT_IN_RESOURCES}
    report("starting Ray and Serve")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # `report` shows the progress
    with (
        local_cluster(
            ceil(needed["CPU"]),
            resources=custom,
            host=host,
            grpc_port=grpc_port,
            http_port=http_port,
            metrics_port=metrics_port,
        ) as endpoints,
        _interrupted_by_sigterm(),
    ):
        report(f"{_startup_work(fleet)} {', '.join(map(describe_models, single_models(fleet)))}")
        application.run(fleet, report, engines)
        _wait_until_serving(endpoints.grpc)
        yield endpoints


def drain(timeout_s: float, stop_now: threading.Event, report: Callable[[str], None]) -> bool:
    """Stop admission, and return when all streams have ended, after `timeout_s`, or when `stop_now` is set.

    Returns whether all streams ended by themselves; the others are cut off, with an error that tells callers why.
    Orchestrators that do not answer may still have streams, and are asked again.
    """
    end_s = time.monotonic() + timeout_s
    reported = ""
    while True:
        left_s = end_s - time.monotonic()
        try:
            num = application.wind_down()
            left, why = _streams(num), f"new requests are refused; {_streams(num)} may continue for {left_s:.0f} s"
        except Unavailable as error:
            num, left, why = None, "the remaining streams", str(error)
        if num == 0:
            stop_now.wait(FLUSH_S)
            return True
        if left != reported:
            report(why)
            reported = left
        if left_s <= 0 or stop_now.wait(DRAIN_PERIOD_S):
            report(f"{left} will be cut off")
            _cut_off(report)
            return False


def _cut_off(report: Callable[[str], None]) -> None:
    try:
        application.cut_off()
    except Unavailable as error:
        report(f"some streams may end without an error message: {error}")
    time.sleep(FLUSH_S)


def _streams(num: int) -> str:
    return f"{num} stream{'s' if num > 1 else ''}"


def _startup_work(fleet: FleetConfig) -> str:
    own = [worker for model in fleet.models for worker in (model.target, model.draft, *model.extra_drafts)]
    if any(worker.engine.compile for worker in (*own, *fleet.drafts.values()) if worker is not None):
        return "loading, compiling (one or two minutes the first time a model is used here) and warming up"
    return "loading and warming up"


def describe_models(config: ServiceConfig) -> str:
    """Paths, dtypes and layers of the models, in one line."""
    target = f"target {_described(config.target.engine)}"
    if config.draft is None:
        return f"{target}, without a draft"
    drafts = [f"draft {_described(each.engine)}" for each in (config.draft, *config.extra_drafts)]
    return " and ".join([target, *drafts])


def _described(engine: EngineConfig) -> str:
    layers = "" if engine.layers is None else f", layers {','.join(map(str, engine.layers))}"
    return f"{engine.model} ({engine.dtype}{layers})"


def changed_settings(config: ServiceConfig) -> list[str]:
    """NAME=VALUE for each setting that differs from its default."""
    plain = ServiceConfig(_plain(config.target), _plain(config.draft) if config.draft else None)
    defaults = dict(flat(asdict(plain)))
    return [f"{name}={value}" for name, value in flat(asdict(config)) if defaults.get(name) != value]


def _without_labels(fleet: FleetConfig) -> FleetConfig:
    """The settings without node labels: this cluster has one node."""
    drafts = {name: replace(draft, labels={}) for name, draft in fleet.drafts.items()}
    orchestrator = replace(fleet.orchestrator, labels={})
    models = tuple(map(_model_without_labels, fleet.models))
    return replace(fleet, models=models, drafts=drafts, orchestrator=orchestrator)


def _model_without_labels(config: ServiceConfig) -> ServiceConfig:
    draft = replace(config.draft, labels={}) if config.draft is not None else None
    extra = tuple(replace(each, labels={}) for each in config.extra_drafts)
    return replace(config, target=replace(config.target, labels={}), draft=draft, extra_drafts=extra)


def _plain(worker: Worker) -> Worker:
    return type(worker)(EngineConfig(worker.engine.model))


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that `with` blocks end in order; Ray's own handler dumps stacks."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # else a shutdown is in progress
            signal.signal(signal.SIGTERM, before)


def _check_free(setting: str, port: int) -> None:
    """Check that a port is free: Serve's own error would not name it. Raises: ConfigError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{setting} {port} cannot be used ({error}): give a free port, or 0 for any") from error


def _wait_until_serving(address: str) -> None:
    with Client(address) as client:
        try:
            client.wait_until_serving(READY_TIMEOUT_S)
        except DeadlinePassed as error:
            raise StartupError(error.message) from error
