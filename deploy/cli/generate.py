"""`outrider generate`: stream completions from a server to the terminal, and keep a trace of their rounds.

Knows options, the client and terminals. Imports neither Ray nor torch, so it starts at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from deploy.cli import terminal
from deploy.cli.jobs import MAX_RETRIES, CallOptions, Job, bearer_token, explain, problem_of_call
from deploy.cli.replay import save
from deploy.trace import Stream, export
from outrider_client import Client, GenerateFields, OutriderError, Retry

EXIT_FAILED = 1
MAX_NAME_CHARS = 60


@dataclass(frozen=True)
class GenerateOptions(CallOptions):
    """Stream completions from a server to the terminal.

    Options that are not given take the server's defaults. The environment variable OUTRIDER_TOKEN holds the token for a
    server that requires one.
    """

    prompts: Annotated[
        list[str] | None, Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")
    ] = field(default=None, kw_only=True)
    source: Annotated[
        str | None,
        Option(
            metavar="TEXT",
            help="Text for an encoder-decoder's encoder; - reads standard input. PROMPT, if given, then begins the "
            "decoder's text.",
        ),
    ] = None
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

    def fields(self) -> GenerateFields:
        """Request fields, the same for each prompt."""
        return {
            **super().fields(),
            "source": _read(self.source) if self.source is not None else None,
            "trace": True if self.trace else None,
            "explain": self.explain or None,
            "receipt": True if self.save else None,
        }


def generate(options: GenerateOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    if (problem := problem_of_call(options)) is not None:
        terminal.say(f"outrider: {problem}")
        return EXIT_FAILED
    prompts = options.prompts or ([""] if options.source is not None else [])
    if (problem := _problem_of(prompts, options)) is not None:
        terminal.say(f"outrider: {problem}")
        return EXIT_FAILED
    if options.trace is not None and options.trace.suffix == ".svg":
        from simulation.report import check_pictures  # takes half a second to import

        check_pictures(options.trace)
    fields = options.fields()
    jobs = [Job(_read(prompt), fields) for prompt in prompts]
    # A retry may reach another server, whose clock differs.
    retry = Retry(max_retries=0 if options.trace else MAX_RETRIES)
    is_written = True
    with Client(options.address, token=bearer_token(), retry=retry) as client:
        try:
            _run(client, jobs, options)
        except OutriderError as error:
            sys.stdout.flush()
            terminal.say(f"outrider: {explain(error, client, options.address)}")
            return EXIT_FAILED
        finally:
            if options.trace is not None:
                is_written = _write_trace(options.trace, jobs)
        if options.save is not None:
            is_written = _save(options.save, jobs[0]) and is_written
    return 0 if is_written else EXIT_FAILED


def _problem_of(prompts: Sequence[str], options: GenerateOptions) -> str | None:
    if not prompts:
        return "PROMPT is missing; only --source can stand without one"
    if options.save is not None and len(prompts) > 1:
        return "--save writes one output: give one prompt"
    if options.source == "-" and "-" in prompts:
        return "standard input can be the source or a prompt, not both"
    return None


def _read(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


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
        problem = f"; cut short: {job.finish.problem}" if job.finish.problem is not None else ""
        terminal.say(f"{terminal.summary(job)}; seed {job.finish.seed}{problem}")


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
    """Write the trace, including streams that failed; returns whether there was one and it could be written."""
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


def _printable(prompt: str) -> str:
    """The end of the prompt on one line."""
    line = repr(prompt)[1:-1]
    return line if len(line) <= MAX_NAME_CHARS else f"...{line[-MAX_NAME_CHARS:]}"
