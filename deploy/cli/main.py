"""The command `outrider`: serve a pair, generate with a server, simulate other hardware, check whether a pair fits.

Knows arguments and terminals. What needs Ray or torch is imported by the command that needs it, so that `generate`
starts at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from core.config import Dtype, EngineConfig, ServiceConfig, WorkerConfig
from core.errors import StartupError
from deploy.cli.generate import DEFAULT_GRPC_PORT, EXIT_FAILED, add_generate
from deploy.cli.simulate import add_simulate
from deploy.cli.terminal import say

if TYPE_CHECKING:
    from deploy.launch import Endpoints

Worker = TypeVar("Worker", bound=WorkerConfig)
DEFAULT_HTTP_PORT = 8000
DEFAULT_DRAIN_TIMEOUT_S = 25.0
"""Less than the 30 s after which Kubernetes kills what it has asked to stop."""
EXIT_NO_START = 2
EXIT_CUT_OFF = 3
"""`serve` was stopped before all streams had ended."""
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except StartupError as error:
        say(f"outrider: {error}")
        return EXIT_NO_START
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description="Speculative decoding, served.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a pair of models on this machine until interrupted"))
    add_generate(commands)
    add_simulate(commands)
    _add_check(commands.add_parser("check", help="whether a pair of models can be served, and why not"))
    return parser


# outrider serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_serve)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML settings; the embedded demo pair without it")
    _add_pair(parser)
    parser.add_argument("--grpc-port", type=int, default=DEFAULT_GRPC_PORT, metavar="N", help="0 takes a free one")
    parser.add_argument("--http-port", type=int, default=DEFAULT_HTTP_PORT, metavar="N", help="0 takes a free one")
    parser.add_argument("--gamma", type=int, metavar="N", help="guesses a round at most; 0 decodes plainly")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of both models")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides",
        help="any other setting by its path, for example target.engine.num_threads=2",
    )  # fmt: skip
    parser.add_argument(
        "--drain-timeout", type=float, default=DEFAULT_DRAIN_TIMEOUT_S, metavar="S",
        help="how long streams may go on after SIGTERM or Ctrl-C; a second one stops at once (default: %(default)g); "
        f"if streams are cut off, the exit status is {EXIT_CUT_OFF}",
    )  # fmt: skip


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="DIR", help="checkpoint of the target")
    parser.add_argument("--draft", metavar="DIR", help="checkpoint of the draft, or none")


def _serve(args: argparse.Namespace) -> int:
    from deploy.launch import drain, served  # imports Ray

    started = time.monotonic()

    def report(stage: str) -> None:
        say(f"[{time.monotonic() - started:5.1f} s] {stage}")

    config = _config(args)
    with (
        _handlers_kept(),
        served(config, report, grpc_port=args.grpc_port, http_port=args.http_port) as endpoints,
    ):
        report("serving")
        _say_banner(config, endpoints)
        have_ended = drain(args.drain_timeout, _wait_for_signal(), report)
        _ignore_signals()
        report("stopping")
    return 0 if have_ended else EXIT_CUT_OFF


@contextmanager
def _handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_signal() -> Event:
    """Return at SIGINT or SIGTERM, with an event that the next one sets."""
    stop, hurry = Event(), Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: (hurry if stop.is_set() else stop).set())
    stop.wait()
    return hurry


def _ignore_signals() -> None:
    """So that nothing stays behind half stopped."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _say_banner(config: ServiceConfig, endpoints: Endpoints) -> None:
    from deploy.api import tokens_path
    from deploy.launch import changed_settings, describe_models

    has_gate = tokens_path(config.orchestrator.tokens_file) is not None
    callers = "callers send a token" if has_gate else "no authentication"
    address = f"localhost:{endpoints.grpc_port}"
    settings = ", ".join(changed_settings(config)) or "all as by default"
    say(
        f"""
  {config.model_name}: {describe_models(config)}
  gRPC       {address} (all interfaces; no TLS, {callers})
  HTTP       {endpoints.host}:{endpoints.http_port} (/-/healthz)
  metrics    {endpoints.host}:{endpoints.metrics_port}/metrics (Prometheus)
  settings   {settings}
  try        {"OUTRIDER_TOKEN=TOKEN " if has_gate else ""}outrider generate 'def fibonacci(n):' --address {address}
  stop       Ctrl-C
"""
    )


def _config(args: argparse.Namespace) -> ServiceConfig:
    """What file and flags say together; flags win. Raises: ConfigError."""
    from deploy.settings import demo_config, read_config

    overrides = [*_flag_overrides(args), *args.overrides]
    config = read_config(args.config, overrides) if args.config else demo_config(overrides)
    if args.dtype is None:
        return config
    draft = _with_dtype(config.draft, args.dtype) if config.draft else None
    return replace(config, target=_with_dtype(config.target, args.dtype), draft=draft)


def _with_dtype(worker: Worker, dtype: Dtype) -> Worker:
    return replace(worker, engine=replace(worker.engine, dtype=dtype))


def _flag_overrides(args: argparse.Namespace) -> Iterator[str]:
    """Flags as settings; paths are written as JSON, which is YAML, so that none is taken for something else."""
    if args.target is not None:
        target = Path(args.target).resolve()
        yield f"target.engine.model={json.dumps(str(target))}"
        yield f"model_name={json.dumps(target.name)}"
        if args.config is None:  # what the demo pair settles for itself is not meant for another target
            yield "target.engine.deterministic=false"
    if args.draft == "none":
        yield "draft=null"
    elif args.draft is not None:
        yield f"draft.engine.model={json.dumps(str(Path(args.draft).resolve()))}"
    if args.gamma is not None:
        yield f"speculation.max_draft_tokens={args.gamma}"


# outrider check


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_check)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="checkpoint of the target")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="checkpoint of the draft")
    parser.add_argument(
        "--no-weights", action="store_true",
        help="look at configuration, vocabulary and the headers of the weights alone: little memory, whatever the size",
    )  # fmt: skip


def _check(args: argparse.Namespace) -> int:
    """Load both as the engines would, unless told otherwise: nothing less says for sure that they can be served."""
    from workers.model import load, survey
    from workers.vocabulary import check_same_vocabulary

    directories = [directory for directory in (args.target, args.draft) if directory is not None]
    try:
        for directory in directories:
            config = EngineConfig(str(directory))
            info = survey(config) if args.no_weights else load(config, lambda _: None).info
            print(f"{directory}: {info.architecture}, {info.num_parameters:,} parameters, "
                  f"{info.vocab_size} tokens, context {info.max_context_tokens}")  # fmt: skip
        if args.draft is not None:
            check_same_vocabulary(args.target, args.draft)
    except StartupError as error:
        print(f"not servable: {error}")
        return EXIT_FAILED
    verdict = "servable, as far as can be told without the weights" if args.no_weights else "servable"
    print(verdict if args.draft is None else f"{verdict}: draft and target share their vocabulary")
    return 0
