"""The whole service on this machine: a Ray cluster of its own, the application on it, up for a block of code.

Knows the order of the start, and the messages about it; deploy.app defines the parts.
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

from core.config import EngineConfig, ServiceConfig, WorkerConfig
from core.errors import ConfigError, StartupError, Unavailable
from deploy import app
from deploy.launch import application
from deploy.launch.cluster import Endpoints, local_cluster
from deploy.settings import flat
from outrider_client import Client, DeadlinePassed

READY_TIMEOUT_S = 60.0
"""Seconds from the loaded models to the first answer through the proxy."""
DRAIN_PERIOD_S = 0.2
LAST_WORDS_S = 0.5
"""Seconds for Serve's proxy to send the last chunks of the orchestrators."""
Worker = TypeVar("Worker", bound=WorkerConfig)
BUILT_IN_RESOURCES = ("CPU", "GPU")
"""Ray's own; GPUs it counts by itself."""


@contextmanager
def served(
    config: ServiceConfig,
    report: Callable[[str], None],
    *,
    grpc_port: int = 0,
    http_port: int = 0,
    engines: app.Engines = app.ENGINES,
) -> Iterator[Endpoints]:
    """Serve `config` until the block ends; port 0 takes a free one. `report` gets each stage in a line.

    Raises: StartupError.
    """
    application.check_pair(config)
    for setting, port in (("--grpc-port", grpc_port), ("--http-port", http_port)):
        _check_free(setting, port)
    config = _anywhere(config)
    needed = app.resources(config)
    custom = {name: amount for name, amount in needed.items() if name not in BUILT_IN_RESOURCES}
    report("starting Ray and Serve")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # `report` says what is happening
    with (
        local_cluster(ceil(needed["CPU"]), resources=custom, grpc_port=grpc_port, http_port=http_port) as endpoints,
        _interrupted_by_sigterm(),
    ):
        report(f"{_what_is_done(config)} {describe_models(config)}")
        application.run(config, report, engines)
        _wait_until_serving(f"localhost:{endpoints.grpc_port}")
        yield endpoints


def drain(timeout_s: float, hurry: threading.Event, report: Callable[[str], None]) -> bool:
    """Stop admission, and return when all streams have ended, after `timeout_s`, or when `hurry` is set.

    Returns whether all have ended by themselves; the others are ended, with the reason for their callers. Orchestrators
    that do not answer may still have streams, and are asked again.
    """
    end_s = time.monotonic() + timeout_s
    told = ""
    while True:
        left_s = end_s - time.monotonic()
        try:
            num = application.wind_down()
            left, why = _streams(num), f"nothing new is taken; {_streams(num)} may go on for {left_s:.0f} s"
        except Unavailable as error:
            num, left, why = None, "what still streams", str(error)
        if num == 0:
            hurry.wait(LAST_WORDS_S)
            return True
        if left != told:
            report(why)
            told = left
        if left_s <= 0 or hurry.wait(DRAIN_PERIOD_S):
            report(f"{left} will be cut off")
            _cut_off(report)
            return False


def _cut_off(report: Callable[[str], None]) -> None:
    try:
        application.cut_off()
    except Unavailable as error:
        report(f"callers may not be told: {error}")
    time.sleep(LAST_WORDS_S)


def _streams(num: int) -> str:
    return f"{num} stream{'s' if num > 1 else ''}"


def _what_is_done(config: ServiceConfig) -> str:
    """To the models, before they serve."""
    workers = (config.target, config.draft, *config.extra_drafts)
    if any(worker.engine.compile for worker in workers if worker is not None):
        return "loading, compiling (a minute or two for a model that is new here) and warming up"
    return "loading and warming up"


def describe_models(config: ServiceConfig) -> str:
    """The models with their settings, in a few words."""
    target = f"target {config.target.engine.model} ({config.target.engine.dtype})"
    if config.draft is None:
        return f"{target}, without a draft"
    drafts = [f"draft {each.engine.model} ({each.engine.dtype})" for each in (config.draft, *config.extra_drafts)]
    return " and ".join([target, *drafts])


def changed_settings(config: ServiceConfig) -> list[str]:
    """NAME=VALUE for each setting that differs from its default."""
    plain = ServiceConfig(_plain(config.target), _plain(config.draft) if config.draft else None)
    defaults = dict(flat(asdict(plain)))
    return [f"{name}={value}" for name, value in flat(asdict(config)) if defaults.get(name) != value]


def _anywhere(config: ServiceConfig) -> ServiceConfig:
    """Drop the labels that distinguish the nodes of a cluster: here there is one."""
    draft = replace(config.draft, labels={}) if config.draft is not None else None
    extra = tuple(replace(each, labels={}) for each in config.extra_drafts)
    orchestrator, target = replace(config.orchestrator, labels={}), replace(config.target, labels={})
    return replace(config, target=target, draft=draft, extra_drafts=extra, orchestrator=orchestrator)


def _plain(worker: Worker) -> Worker:
    return type(worker)(EngineConfig(worker.engine.model))


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM as a KeyboardInterrupt, so that blocks are left; the handler that Ray has put in place dumps stacks."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # or what stops now would be stopped half way
            signal.signal(signal.SIGTERM, before)


def _check_free(setting: str, port: int) -> None:
    """Serve would not say which port it failed on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{setting} {port} cannot be used: {error}") from error


def _wait_until_serving(address: str) -> None:
    with Client(address) as client:
        try:
            client.wait_until_serving(READY_TIMEOUT_S)
        except DeadlinePassed as error:
            raise StartupError(error.message) from error
