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

    The server decides what is not given. One that asks for a token gets that in the environment's OUTRIDER_TOKEN.
    """

    prompts: Annotated[list[str], Argument(metavar="PROMPT", help="Text to go on from; - reads standard input.")]
    address: Annotated[str, Option(metavar="HOST:PORT", help="Of the server.")] = f"localhost:{DEFAULT_GRPC_PORT}"
    model: Annotated[str | None, Option(metavar="NAME", help="One of the models that the server has.")] = None
    max_tokens: Annotated[int | None, number(Range(1, 2**31 - 1, is_whole=True), "Tokens of output at most")] = None
    temperature: Annotated[float | None, number(SAMPLING["temperature"], "Sampling temperature", metavar="T")] = None
    top_k: Annotated[int | None, number(SAMPLING["top_k"], "Sample from the N likeliest tokens")] = None
    top_p: Annotated[
        float | None, number(SAMPLING["top_p"], "Sample from the likeliest tokens that have P together", metavar="P")
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
    verification: Annotated[Verification | None, Option(help="How the target checks what the draft has guessed.")] = (
        None
    )
    lenience: Annotated[
        float | None,
        number(LENIENCE, "Of lenient rules: how much less likely than the best a guess may be", metavar="L"),
    ] = None
    policy: Annotated[Policy | None, Option(help="How to decide how far to draft.")] = None
    pipelining: Annotated[
        bool | None,
        Option(
            "--pipelining/--no-pipelining",
            help="Prepare the next block while the last one is verified, or draft and verify in turn.",
        ),
    ] = None
    guesser: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Who guesses: draft, prompt_lookup and others that the server knows; may be repeated.",
        ),
    ] = None
    draft_temperature: Annotated[
        float | None,
        number(DRAFT_TEMPERATURE, "Of the draft alone; the output's law stays the target's", metavar="T"),
    ] = None
    no_draft: Annotated[bool, Option("--no-draft", help="Decode plainly, without a draft.")] = False
    trace: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the rounds of all prompts to FILE, for ui.perfetto.dev; as a picture if it ends with .svg.",
        ),
    ] = None
    explain: Annotated[
        bool, Option("--explain", help="Say why each round went as it did, a line each, on standard error.")
    ] = False
    save: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Keep the receipt, the request and the tokens, for outrider replay; of one prompt."
        ),
    ] = None
    color: Annotated[
        Literal["auto", "always", "never"], Option(help="Tell guessed tokens by colour; auto does so in a terminal.")
    ] = "auto"

    def fields(self) -> GenerateFields:
        """What is asked of the server with each prompt."""
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
        terminal.say("outrider: --save keeps one output; give one prompt")
        return EXIT_FAILED
    jobs = [Job(_read(prompt), options.fields()) for prompt in options.prompts]
    retry = Retry(max_retries=0 if options.trace else MAX_RETRIES)  # another server has another clock
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
    """One prompt is shown as it comes; several run at once and are shown whole, in order. Raises: OutriderError."""
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
    """Whether there was a receipt, and it could be written."""
    if job.finish.receipt is None:
        terminal.say("outrider: the server has sent no receipt")
        return False
    try:
        save(path, job)
    except OSError as error:
        terminal.say(f"outrider: the receipt cannot be written: {error}")
        return False
    terminal.say(f"receipt in {path}; outrider replay {path} computes the output again")
    return True


def _write_trace(path: Path, jobs: Sequence[Job]) -> bool:
    """Write what there is, of streams that failed, too. Whether there was something, and it could be written."""
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
    """The prompt's end, on one line: what distinguishes it, and what the output goes on from."""
    line = repr(prompt)[1:-1]
    return line if len(line) <= MAX_NAME_CHARS else f"...{line[-MAX_NAME_CHARS:]}"
