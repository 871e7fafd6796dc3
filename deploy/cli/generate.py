"""`outrider generate`: stream completions from a server to the terminal, and keep a trace of their rounds.

Knows arguments, the client and terminals. Imports neither Ray nor torch, so it starts at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import grpc

from core.records import Policy
from deploy.cli import terminal
from deploy.client import CallFailed, Client, Completion
from deploy.trace import Stream, export
from protos.outrider.v1 import generation_pb2 as pb

DEFAULT_GRPC_PORT = 9000
EXIT_FAILED = 1
MAX_NAME_CHARS = 60
BEARER_VARIABLE = "OUTRIDER_TOKEN"
"""The environment may have the token that the server asks for: what stands on a command line, others can read."""

Show = Callable[[pb.GenerateChunk], None]


def add_generate(commands: Any) -> None:
    """Add the command to those of `outrider` (an argparse action of subparsers)."""
    parser = commands.add_parser(
        "generate", help="stream completions from a server to the terminal",
        epilog=f"A server that asks for a token gets the one in the environment's {BEARER_VARIABLE}.",
    )  # fmt: skip
    parser.set_defaults(command=_generate)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to go on from; - reads standard input")
    parser.add_argument("--address", default=f"localhost:{DEFAULT_GRPC_PORT}", metavar="HOST:PORT")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="N")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="the same seed gives the same text, but with --verification rejection or block",
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this; may be repeated")
    parser.add_argument("--verification", choices=("coupled", "rejection", "block"))
    parser.add_argument("--policy", choices=get_args(Policy), help="who decides how far to draft")
    parser.add_argument(
        "--pipelining", action=argparse.BooleanOptionalAction,
        help="prepare the next block while the last one is verified, or draft and verify in turn; else as it is served",
    )  # fmt: skip
    parser.add_argument("--no-draft", action="store_true", help="decode plainly")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="write the rounds of all prompts to FILE, for ui.perfetto.dev; or as a picture, if it ends with .svg",
    )  # fmt: skip
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


@dataclass
class _Job:
    """One prompt on its way."""

    prompt: str
    request: pb.GenerateRequest
    began_s: float = 0.0
    chunks: list[pb.GenerateChunk] = field(default_factory=list)

    def run(self, client: Client, show: Show) -> Completion:
        """Stream to the end. Raises: CallFailed."""

        def keep(chunk: pb.GenerateChunk) -> None:
            self.chunks.append(chunk)
            show(chunk)

        self.began_s = time.monotonic()
        return client.complete(self.request, keep)

    @property
    def is_traced(self) -> bool:
        return any(chunk.trace for chunk in self.chunks)

    def stream(self) -> Stream:
        return Stream(_printable(self.prompt), self.began_s, self.chunks)


def _generate(args: argparse.Namespace) -> int:
    try:
        jobs = [_Job(prompt, _request(prompt, args)) for prompt in map(_read, args.prompts)]
    except ValueError as error:  # a number that the field cannot hold
        terminal.say(f"outrider: {error}")
        return EXIT_FAILED
    is_colored = terminal.use_color(args.color, sys.stdout, bool(os.environ.get("NO_COLOR")))
    token = os.environ.get(BEARER_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):  # gRPC would say so at length
        terminal.say(f"outrider: {BEARER_VARIABLE} must be of printable ASCII characters")
        return EXIT_FAILED
    with Client(args.address, token or None) as client:
        try:
            _run(client, jobs, is_colored)
        except CallFailed as error:
            sys.stdout.flush()
            terminal.say(f"outrider: {_explain(error, client)}")
            return EXIT_FAILED
        finally:
            is_written = args.trace is None or _write_trace(args.trace, jobs)
    return 0 if is_written else EXIT_FAILED


def _read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _request(prompt: str, args: argparse.Namespace) -> pb.GenerateRequest:
    """Only what was given is set; the server has defaults for the rest. Raises: ValueError."""
    return pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed),
        stopping=pb.StoppingParams(max_tokens=args.max_tokens, stop=args.stop),
        speculation=pb.SpeculationParams(
            max_draft_tokens=0 if args.no_draft else None,
            verification=f"VERIFICATION_{args.verification.upper()}" if args.verification else None,
            policy=args.policy,
            pipelining=args.pipelining,
            trace=args.trace is not None,
        ),
    )


def _run(client: Client, jobs: Sequence[_Job], is_colored: bool) -> None:
    """One prompt is shown as it comes; several run at once and are shown whole, in order. Raises: CallFailed."""
    text_of = client.token_text if is_colored else None
    if len(jobs) == 1:
        completions = [jobs[0].run(client, terminal.Writer(sys.stdout, text_of))]
        sys.stdout.write("\n")
    else:
        completions = _run_at_once(client, jobs)
        for job in jobs:
            terminal.say(f"--- {_printable(job.prompt)}")
            terminal.Writer(sys.stdout, text_of).whole(job.chunks)
    sys.stdout.flush()
    if is_colored:
        terminal.say(f"\n{terminal.LEGEND}")
    for completion in completions:
        terminal.say(f"{terminal.summary(completion)}; seed {completion.finish.seed}")


def _run_at_once(client: Client, jobs: Sequence[_Job]) -> list[Completion]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: job.run(client, lambda _: None), jobs))


def _write_trace(path: Path, jobs: Sequence[_Job]) -> bool:
    """Write what there is, of streams that failed, too. Whether there was something, and it could be written."""
    traced = [job.stream() for job in jobs if job.is_traced]
    if not traced:
        terminal.say("outrider: the server has sent nothing to trace")
        return False
    try:
        export.write(path, traced)
    except OSError as error:
        terminal.say(f"outrider: the trace cannot be written: {error}")
        return False
    terminal.say(f"trace of {len(traced)} streams in {path}")
    return True


def _explain(error: CallFailed, client: Client) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE and not client.is_serving():
        return f"no server answers at {client.address}; start one with: outrider serve"
    return str(error)


def _printable(prompt: str) -> str:
    """The prompt's end, on one line: what distinguishes it, and what the output goes on from."""
    line = repr(prompt)[1:-1]
    return line if len(line) <= MAX_NAME_CHARS else f"...{line[-MAX_NAME_CHARS:]}"
