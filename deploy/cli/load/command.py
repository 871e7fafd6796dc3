"""Runs the load, shows its progress, and prints the figures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from core.errors import StartupError
from deploy.cli.generate import EXIT_FAILED
from deploy.cli.jobs import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT, bearer_token
from deploy.cli.load.callers import CallFailed, Fields, GrpcCaller, LoadCaller
from deploy.cli.load.driver import Driver, arrivals_s, starts_s
from deploy.cli.load.options import DEFAULT_CONCURRENCY, BenchOptions
from deploy.cli.load.prompts import Workload
from deploy.cli.load.records import RequestOutcome, RequestRecord
from deploy.cli.load.report import as_document, table
from deploy.cli.load.summary import Objectives, summarize
from deploy.cli.options import read_prompts
from deploy.cli.terminal import say
from deploy.clock import MonotonicClock

MS = 1e-3


def bench(options: BenchOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    options.check()
    texts = read_prompts(options.prompts) if options.prompts is not None else []
    records: list[RequestRecord] = []
    try:
        asyncio.run(_run(options, texts, records))
    except KeyboardInterrupt:
        say("interrupted: the figures cover the requests that have ended")
    ended = [record for record in records if record.ended_s]
    if not ended:
        say("outrider: no request has ended; is the server running, and is --duration long enough?")
        return EXIT_FAILED
    objectives = _objectives(options)
    summary = summarize(ended, objectives)
    sys.stdout.write(table(summary, objectives))
    if options.json is not None:
        options.json.write_text(as_document(options, summary, ended))
    return 0 if summary.outcomes.get(RequestOutcome.COMPLETED) else EXIT_FAILED


async def _run(options: BenchOptions, texts: list[str], records: list[RequestRecord]) -> None:
    """Fills `records` as requests are sent. Raises: StartupError when the service cannot be reached."""
    caller = _caller(options)
    try:
        workload = await _workload(options, texts, caller)
        await _warm_up(options, workload, caller)
        with _bar(options.requests) as observer:
            driver = _driver(options, caller, observer)
            driver.records = records
            requests = workload.requests(options.requests)
            if options.rate is not None:
                times = arrivals_s(options.requests, options.rate, options.arrivals, options.ramp, options.seed)
                await driver.open_loop(requests, times.tolist())
            else:
                starts = starts_s(options.concurrency or DEFAULT_CONCURRENCY, options.ramp)
                await driver.closed_loop(requests, starts.tolist())
    finally:
        await caller.close()


def _caller(options: BenchOptions) -> LoadCaller:
    token = bearer_token()
    fields = Fields(options.model, options.temperature, options.ignore_eos, options.no_draft)
    if options.api == "http":
        from deploy.cli.load.http_caller import HttpCaller  # imports aiohttp, which other commands do not need

        return HttpCaller(options.address or f"localhost:{DEFAULT_HTTP_PORT}", token, fields)
    return GrpcCaller(options.address or f"localhost:{DEFAULT_GRPC_PORT}", token, fields)


def _driver(options: BenchOptions, caller: LoadCaller, observer: Callable[[RequestRecord], None]) -> Driver:
    return Driver(caller, MonotonicClock(), observer, duration_s=options.duration, timeout_s=options.timeout)


async def _workload(options: BenchOptions, texts: list[str], caller: LoadCaller) -> Workload:
    """Raises: StartupError."""
    try:
        vocab_size = 0 if texts else await caller.vocab_size()
    except CallFailed as failure:
        raise StartupError(f"the service does not answer: {failure}") from None
    lengths = options.prompt_tokens, vocab_size, options.output_tokens
    return Workload(texts, *lengths, cancel_share=options.cancel_share, seed=options.seed)


async def _warm_up(options: BenchOptions, workload: Workload, caller: LoadCaller) -> None:
    """Send the requests of the warm-up. Raises: StartupError when one of them fails, because others would fail too."""
    requests = islice(workload.requests(options.warmup), options.warmup)
    driver = _driver(options, caller, lambda _: None)
    await driver.closed_loop(
        requests, starts_s(min(options.warmup, DEFAULT_CONCURRENCY), 0.0).tolist() if options.warmup else []
    )
    failed = [record.error for record in driver.records if record.outcome is RequestOutcome.FAILED]
    if failed:
        raise StartupError(f"a request of the warm-up failed: {failed[0]}")


def _objectives(options: BenchOptions) -> Objectives:
    given = (options.slo_ttft_ms, options.slo_tpot_ms, options.slo_e2e_ms)
    return Objectives(*(most * MS if most is not None else None for most in given))


@contextmanager
def _bar(num_requests: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Show numbers of requests and tokens while the load runs, in a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    text = TextColumn("{task.fields[live]}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, live = progress.add_task("", total=num_requests, live=""), _Live()

        def observe(record: RequestRecord) -> None:
            live.observe(record)
            progress.update(task, completed=live.num_ended, live=str(live))

        yield observe


class _Live:
    """Counts of a run in progress, for the progress bar."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._open: dict[int, int] = {}
        """Tokens so far of each request that has not ended."""
        self._num_failed = 0
        self._ended_tokens = 0
        self.num_ended = 0

    def observe(self, record: RequestRecord) -> None:
        """Count a request that was sent, has received a piece, or has ended."""
        self._open[record.index] = record.output_tokens
        if record.ended_s:
            self.num_ended += 1
            self._num_failed += record.outcome in (RequestOutcome.FAILED, RequestOutcome.REFUSED)
            self._ended_tokens += self._open.pop(record.index)

    def __str__(self) -> str:
        tokens = self._ended_tokens + sum(self._open.values())
        rate = tokens / max(time.monotonic() - self._began_s, 1e-9)
        return f"{len(self._open)} in flight, {self._num_failed} failed, {rate:.0f} tokens/s"
