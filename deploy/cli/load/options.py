"""The options of `outrider bench`; every run is limited in number and in time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from core.errors import ConfigError
from core.ranges import Range, ranges_of
from core.records import Sampling
from deploy.cli.load.driver import Arrivals
from deploy.cli.load.prompts import Lengths
from deploy.cli.options import check_folders, number

WHAT, WHEN, GOALS = "Requests", "Schedule", "Objectives"
SECONDS = Range(0.0, 86_400.0, excludes_low=True)
MILLISECONDS = Range(0.0, 3_600_000.0, excludes_low=True)
DEFAULT_CONCURRENCY = 8
DEFAULT_LENGTHS = Lengths(64, 64)


def _lengths(help_text: str) -> Any:
    def parse(text: str | Lengths) -> Lengths:
        if isinstance(text, Lengths):  # the default
            return text
        try:
            return Lengths.parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return Option(help=f"{help_text}: N, or LOW-HIGH.", metavar="N|LOW-HIGH", parser=parse, rich_help_panel=WHAT)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Put load on a running service, and report latency, throughput and goodput as its callers see them.

    With --rate requests are sent at scheduled times, whether or not earlier ones have ended (open loop), and latencies
    count from these times. Otherwise --concurrency callers each send their next request when the last one has ended
    (closed loop). The environment variable OUTRIDER_TOKEN holds the token for a service that requires one.

    The exit status is 1 if no request completed.
    """

    address: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Address of the server; by default a local one.")
    ] = None
    api: Annotated[Literal["grpc", "http"], Option(help="Protocol; http streams /v1/completions.")] = "grpc"
    model: Annotated[str | None, Option(metavar="NAME", help="Model, if the server has several.")] = None

    requests: Annotated[int, number(Range(1, 1_000_000, is_whole=True), "Requests to send at most", panel=WHEN)] = 100
    duration: Annotated[float, number(SECONDS, "Seconds after which no request is sent", metavar="S", panel=WHEN)] = (
        300.0
    )
    timeout: Annotated[float, number(SECONDS, "Seconds that each request may take", metavar="S", panel=WHEN)] = 120.0
    rate: Annotated[
        float | None,
        number(Range(0.0, 10_000.0, excludes_low=True), "Requests a second of an open loop", metavar="R", panel=WHEN),
    ] = None
    arrivals: Annotated[
        Arrivals, Option(help="Arrivals of an open loop: random (Poisson) or evenly spaced.", rich_help_panel=WHEN)
    ] = "poisson"
    concurrency: Annotated[
        int | None,
        number(
            Range(1, 4096, is_whole=True), f"Callers of a closed loop, {DEFAULT_CONCURRENCY} if not given", panel=WHEN
        ),
    ] = None
    ramp: Annotated[
        float,
        number(
            Range(0.0, 86_400.0),
            "Seconds over which the rate rises from 0, or the callers start one by one",
            metavar="S",
            panel=WHEN,
        ),
    ] = 0.0
    warmup: Annotated[
        int, number(Range(0, 1000, is_whole=True), "Warm-up requests, which are not counted", panel=WHEN)
    ] = 0

    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="One prompt a line, or a .jsonl file of JSON strings, in turn; without it, random token ids.",
            rich_help_panel=WHAT,
        ),
    ] = None
    prompt_tokens: Annotated[Lengths, _lengths("Length of random prompts")] = DEFAULT_LENGTHS
    output_tokens: Annotated[Lengths, _lengths("Length of outputs at most")] = DEFAULT_LENGTHS
    ignore_eos: Annotated[
        bool,
        Option(
            "--ignore-eos/--no-ignore-eos",
            help="Continue past end-of-sequence tokens, so that outputs have their full length.",
            rich_help_panel=WHAT,
        ),
    ] = True
    temperature: Annotated[
        float | None, number(ranges_of(Sampling)["temperature"], "Sampling temperature", metavar="T", panel=WHAT)
    ] = None
    no_draft: Annotated[bool, Option("--no-draft", help="Decode without a draft.", rich_help_panel=WHAT)] = False
    cancel_share: Annotated[
        float,
        number(
            Range(0.0, 1.0), "Share of requests cancelled after a random part of their output", metavar="P", panel=WHAT
        ),
    ] = 0.0
    seed: Annotated[
        int, number(Range(0, 2**31 - 1, is_whole=True), "Seed of the requests and their times", panel=WHAT)
    ] = 0

    slo_ttft_ms: Annotated[
        float | None, number(MILLISECONDS, "Objective of goodput: time to the first token", metavar="MS", panel=GOALS)
    ] = None
    slo_tpot_ms: Annotated[
        float | None,
        number(MILLISECONDS, "Objective of goodput: time per token after the first", metavar="MS", panel=GOALS),
    ] = None
    slo_e2e_ms: Annotated[
        float | None, number(MILLISECONDS, "Objective of goodput: time of the whole request", metavar="MS", panel=GOALS)
    ] = None
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures, and every request, to FILE.")] = None

    def check(self) -> None:
        """Raises: ConfigError."""
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate (an open loop) and --concurrency (a closed one) exclude each other")
        check_folders(self.json)
