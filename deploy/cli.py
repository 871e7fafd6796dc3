"""The command `outrider`: serve a pair of models, generate with a server, check whether a pair can be served.

Knows arguments and terminals. What needs Ray or torch is imported by the command that needs it, so that `generate`
starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import grpc

from core.config import Dtype, EngineConfig, ServiceConfig, WorkerConfig
from core.errors import StartupError
from deploy import terminal
from deploy.client import CallFailed, Client
from protos.outrider.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from deploy.cluster import Endpoints

DEFAULT_GRPC_PORT = 9000
DEFAULT_HTTP_PORT = 8000
EXIT_FAILED = 1
EXIT_NO_START = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except StartupError as error:
        _say(f"outrider: {error}")
        return EXIT_NO_START
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description="Speculative decoding, served.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a pair of models on this machine until interrupted"))
    _add_generate(commands.add_parser("generate", help="stream a completion from a server to the terminal"))
    _add_check(commands.add_parser("check", help="whether a pair of models can be served, and why not"))
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="DIR", help="checkpoint of the target")
    parser.add_argument("--draft", metavar="DIR", help="checkpoint of the draft, or none")


def _serve(args: argparse.Namespace) -> int:
    from deploy.local import served  # imports Ray

    started = time.monotonic()

    def report(stage: str) -> None:
        _say(f"[{time.monotonic() - started:5.1f} s] {stage}")

    config = _config(args)
    with (
        _handlers_kept(),
        served(config, report, grpc_port=args.grpc_port, http_port=args.http_port) as endpoints,
    ):
        report("serving")
        _say_banner(config, endpoints)
        _wait_for_signal()
        report("stopping")
    return 0


@contextmanager
def _handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_signal() -> None:
    """Return at SIGINT or SIGTERM; further ones are ignored, so that nothing stays behind half stopped."""
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _say_banner(config: ServiceConfig, endpoints: Endpoints) -> None:
    from deploy.local import changed_settings, describe_models

    address = f"localhost:{endpoints.grpc_port}"
    settings = ", ".join(changed_settings(config)) or "all as by default"
    _say(
        f"""
  {config.model_name}: {describe_models(config)}
  gRPC       {address} (all interfaces; no TLS, no authentication)
  HTTP       {endpoints.host}:{endpoints.http_port} (/-/healthz)
  settings   {settings}
  try        outrider generate 'def fibonacci(n):' --address {address}
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


def _with_dtype(worker: WorkerConfig, dtype: Dtype) -> WorkerConfig:
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


# outrider generate


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_generate)
    parser.add_argument("prompt", help="text to go on from; - reads standard input")
    parser.add_argument("--address", default=f"localhost:{DEFAULT_GRPC_PORT}", metavar="HOST:PORT")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="N")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this; may be repeated")
    parser.add_argument("--verification", choices=("coupled", "rejection", "block"))
    parser.add_argument("--no-draft", action="store_true", help="decode plainly")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def _generate(args: argparse.Namespace) -> int:
    try:
        request = _request(args)
    except ValueError as error:  # a number that the field cannot hold
        _say(f"outrider: {error}")
        return EXIT_FAILED
    is_colored = terminal.use_color(args.color, sys.stdout, bool(os.environ.get("NO_COLOR")))
    with Client(args.address) as client:
        try:
            _show(client, request, is_colored)
        except CallFailed as error:
            sys.stdout.flush()
            _say(f"outrider: {_explain(error, client)}")
            return EXIT_FAILED
    return 0


def _request(args: argparse.Namespace) -> pb.GenerateRequest:
    """Only what was given is set; the server has defaults for the rest. Raises: ValueError."""
    return pb.GenerateRequest(
        text=sys.stdin.read() if args.prompt == "-" else args.prompt,
        sampling=pb.SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed),
        stopping=pb.StoppingParams(max_tokens=args.max_tokens, stop=args.stop),
        speculation=pb.SpeculationParams(
            max_draft_tokens=0 if args.no_draft else None,
            verification=f"VERIFICATION_{args.verification.upper()}" if args.verification else None,
        ),
    )


def _show(client: Client, request: pb.GenerateRequest, is_colored: bool) -> None:
    """Stream to standard output; legend and statistics go to standard error. Raises: CallFailed."""
    completion = client.complete(request, terminal.Writer(sys.stdout, client.token_text if is_colored else None))
    print(flush=True)
    if is_colored:
        _say(f"\n{terminal.LEGEND}")
    _say(f"{terminal.summary(completion)}; seed {completion.finish.seed}")


def _explain(error: CallFailed, client: Client) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE and not client.is_serving():
        return f"no server answers at {client.address}; start one with: outrider serve"
    return str(error)


# outrider check


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_check)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="checkpoint of the target")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="checkpoint of the draft")


def _check(args: argparse.Namespace) -> int:
    """Load both as the engines would: nothing less says for sure that they can be served."""
    from workers.vocabulary import check_same_vocabulary
    from workers.weights import load

    directories = [directory for directory in (args.target, args.draft) if directory is not None]
    try:
        for directory in directories:
            info = load(EngineConfig(str(directory)), lambda _: None).info
            print(f"{directory}: {info.architecture}, {info.num_parameters:,} parameters, "
                  f"{info.vocab_size} tokens, context {info.max_context_tokens}")  # fmt: skip
        if args.draft is not None:
            check_same_vocabulary(args.target, args.draft)
    except StartupError as error:
        print(f"not servable: {error}")
        return EXIT_FAILED
    print("servable" if args.draft is None else "servable: draft and target share their vocabulary")
    return 0
