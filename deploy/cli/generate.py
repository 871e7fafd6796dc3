"""`outrider generate`: stream completions from a server to the terminal, and keep a trace of their rounds.

Knows options, the client and terminals. Imports neither Ray nor torch, so it starts at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import grpc
from typer import Argument, Option

from core.ranges import DRAFT_TEMPERATURE, LENIENCE, SAMPLING, Range
from core.records import Policy
from deploy.cli import terminal
from deploy.cli.jobs import BEARER_VARIABLE, DEFAULT_GRPC_PORT, MAX_RETRIES, Job, bearer_token
from deploy.cli.options import number
from deploy.cli.replay import save
from deploy.trace import Stream, export
from outrider_client import Client, GenerateFields, OutriderError, Retry, Verification

EXIT_FAILED = 1
MAX_NAME_CHARS = 60


@dataclass(frozen=True)
class GenerateOptions:
    """Stream completions from a server to the terminal.

    Options that are not given take the server's defaults. The environment variable OUTRIDER_TOKEN holds the token for a
    server that requires one.
    """

    prompts: Annotated[list[str], Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")]
    address: Annotated[str, Option(metavar="HOST:PORT", help="Address of the server.")] = (
        f"localhost:{DEFAULT_GRPC_PORT}"
    )
    model: Annotated[str | None, Option(metavar="NAME", help="One of the models that the server has.")] = None
    max_tokens: Annotated[int | None, number(Range(1, 2**31 - 1, is_whole=True), "Tokens of output at most")] = None
    temperature: Annotated[float | None, number(SAMPLING["temperature"], "Sampling temperature", metavar="T")] = None
    top_k: Annotated[int | None, number(SAMPLING["top_k"], "Sample from the N likeliest tokens")] = None
    top_p: Annotated[
        float | None,
        number(SAMPLING["top_p"], "Sample from the likeliest tokens with a total probability of P", metavar="P"),
    ] = None
    seed: Annotated[
        int | None,
        number(
            SAMPLING["seed"],
            "The same seed gives the same text, except with a --verification other than coupled",
            metavar="S",
        ),
    ] = None
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="End the output before this text; may be repeated.")
    ] = None
    verification: Annotated[Verification | None, Option(help="How the target verifies the draft's guesses.")] = None
    lenience: Annotated[
        float | None,
        number(
            LENIENCE, "For lenient rules: a guess may be less likely than the best token by this factor", metavar="L"
        ),
    ] = None
    policy: Annotated[Policy | None, Option(help="How the draft length is chosen.")] = None
    pipelining: Annotated[
        bool | None,
        Option(
            "--pipelining/--no-pipelining",
            help="Draft the next block while the last one is verified, or alternate.",
        ),
    ] = None
    guesser: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Source of guesses: draft, prompt_lookup and others that the server has; may be repeated.",
        ),
    ] = None
    draft_temperature: Annotated[
        float | None,
        number(
            DRAFT_TEMPERATURE, "Temperature of the draft; the output's distribution stays the target's", metavar="T"
        ),
    ] = None
    no_draft: Annotated[bool, Option("--no-draft", help="Decode without a draft.")] = False
    trace: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a trace of all rounds to FILE, for ui.perfetto.dev, or as a picture if FILE ends with .svg.",
        ),
    ] = None
    explain: Annotated[bool, Option("--explain", help="Explain each round in a line on standard error.")] = False
    save: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write receipt, request and tokens of one prompt to FILE, for outrider replay."),
    ] = None
    color: Annotated[
        Literal["auto", "always", "never"], Option(help="Colour guessed tokens; auto does so in a terminal.")
    ] = "auto"

    def fields(self) -> GenerateFields:
        """The request fields that go with each prompt."""
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
            "verification": self.verification,
            "lenience": self.lenience,
            "policy": self.policy,
            "pipelining": self.pipelining,
            "guessers": self.guesser,
            "draft_temperature": self.draft_temperature,
            "max_draft_tokens": 0 if self.no_draft else None,
            "trace": True if self.trace else None,
            "explain": self.explain or None,
            "receipt": True if self.save else None,
        }


def generate(options: GenerateOptions) -> int:
    """Returns the exit status."""
    token = bearer_token()
    if token is not None and not (token.isascii() and token.isprintable()):  # gRPC's own message is long
        terminal.say(f"outrider: {BEARER_VARIABLE} must be of printable ASCII characters")
        return EXIT_FAILED
    if options.save is not None and len(options.prompts) > 1:
        terminal.say("outrider: --save writes one output: give one prompt")
        return EXIT_FAILED
    jobs = [Job(_read(prompt), options.fields()) for prompt in options.prompts]
    # A retry may reach another server, whose clock differs.
    retry = Retry(max_retries=0 if options.trace else MAX_RETRIES)
    is_written = True
    with Client(options.address, token=token, retry=retry) as client:
        try:
            _run(client, jobs, options)
        except OutriderError as error:
            sys.stdout.flush()
            terminal.say(f"outrider: {_explain(error, client, options.address)}")
            return EXIT_FAILED
        finally:
            if options.trace is not None:
                is_written = _write_trace(options.trace, jobs)
        if options.save is not None:
            is_written = _save(options.save, jobs[0]) and is_written
    return 0 if is_written else EXIT_FAILED


def _read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _run(client: Client, jobs: Sequence[Job], options: GenerateOptions) -> None:
    """Show one prompt as it streams, or several when they are complete, in order. Raises: OutriderError."""
    is_colored = terminal.use_color(options.color, sys.stdout, bool(os.environ.get("NO_COLOR")))
    text_of = terminal.token_text(client, options.model) if is_colored else None
    if len(jobs) == 1:
        jobs[0].run(client, terminal.Writer(sys.stdout, text_of))
        sys.stdout.write("\n")
    else:
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(lambda job: job.run(client), jobs))
        for job in jobs:
            terminal.say(f"--- {_printable(job.prompt)}")
            terminal.Writer(sys.stdout, text_of).whole(job.chunks)
    sys.stdout.flush()
    if is_colored:
        terminal.say(f"\n{terminal.LEGEND}")
    for job in jobs:
        for line in job.explanation if options.explain else ():
            terminal.say(line)
        terminal.say(f"{terminal.summary(job)}; seed {job.finish.seed}")


def _save(path: Path, job: Job) -> bool:
    """Write the receipt; returns whether there was one and it could be written."""
    if job.finish.receipt is None:
        terminal.say("outrider: the server has sent no receipt")
        return False
    try:
        save(path, job)
    except OSError as error:
        terminal.say(f"outrider: the receipt cannot be written: {error}")
        return False
    terminal.say(f"receipt in {path}; outrider replay {path} recomputes the output")
    return True


def _write_trace(path: Path, jobs: Sequence[Job]) -> bool:
    """Write the trace, also of streams that failed; returns whether there was one and it could be written."""
    traced = [
        Stream(_printable(job.prompt), job.began_s, job.chunks)
        for job in jobs
        if any(chunk.trace for chunk in job.chunks)
    ]
    if not traced:
        terminal.say("outrider: the server has sent nothing to trace")
        return False
    try:
        export.write(path, traced)
    except OSError as error:
        terminal.say(f"outrider: the trace cannot be written: {error}")
        return False
    terminal.say(f"trace of {len(traced)} {'stream' if len(traced) == 1 else 'streams'} in {path}")
    return True


def _explain(error: OutriderError, client: Client, address: str) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE and not client.is_serving():
        return f"no server answers at {address}; start one with: outrider serve"
    return str(error)


def _printable(prompt: str) -> str:
    """The end of the prompt on one line."""
    line = repr(prompt)[1:-1]
    return line if len(line) <= MAX_NAME_CHARS else f"...{line[-MAX_NAME_CHARS:]}"
