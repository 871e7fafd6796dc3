"""What `outrider bench` is asked for; every run is bounded in number and in time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from core.errors import ConfigError
from core.ranges import SAMPLING, Range
from deploy.cli.load.prompts import Lengths
from deploy.cli.load.schedule import Arrivals
from deploy.cli.options import check_folders, number

WHAT, WHEN, GOALS = "What is asked", "When it is asked", "What is wanted"
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
    """Put load on a running service, and report what its callers would see.

    With --rate requests are sent at times of their own, whatever becomes of those before (open loop), and latencies
    count from these times. Without it, --concurrency callers each send the next request when their last one has ended
    (closed loop). A service that asks for a token gets that in the environment's OUTRIDER_TOKEN.

    The exit status is 1 if no request completed.
    """

    address: Annotated[str | None, Option(metavar="HOST:PORT", help="Of the server; a local one by default.")] = None
    api: Annotated[Literal["grpc", "http"], Option(help="The language to ask in; http streams /v1/completions.")] = (
        "grpc"
    )
    model: Annotated[str | None, Option(metavar="NAME", help="One of the models that the server has.")] = None

    requests: Annotated[int, number(Range(1, 1_000_000, is_whole=True), "Requests to send at most", panel=WHEN)] = 100
    duration: Annotated[float, number(SECONDS, "Seconds after which none is sent", metavar="S", panel=WHEN)] = 300.0
    timeout: Annotated[float, number(SECONDS, "Seconds that each may take", metavar="S", panel=WHEN)] = 120.0
    rate: Annotated[
        float | None,
        number(Range(0.0, 10_000.0, excludes_low=True), "Requests a second of an open loop", metavar="R", panel=WHEN),
    ] = None
    arrivals: Annotated[Arrivals, Option(help="Of an open loop: at random, or evenly.", rich_help_panel=WHEN)] = (
        "poisson"
    )
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
            "Seconds over which the rate rises from 0, or the callers begin one by one",
            metavar="S",
            panel=WHEN,
        ),
    ] = 0.0
    warmup: Annotated[
        int, number(Range(0, 1000, is_whole=True), "Requests before all others, which do not count", panel=WHEN)
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
            help="Let outputs have their full length, whatever the model would end.",
            rich_help_panel=WHAT,
        ),
    ] = True
    temperature: Annotated[
        float | None, number(SAMPLING["temperature"], "Sampling temperature", metavar="T", panel=WHAT)
    ] = None
    no_draft: Annotated[bool, Option("--no-draft", help="Decode plainly, without a draft.", rich_help_panel=WHAT)] = (
        False
    )
    cancel_share: Annotated[
        float,
        number(
            Range(0.0, 1.0), "Share of requests given up after a random part of their output", metavar="P", panel=WHAT
        ),
    ] = 0.0
    seed: Annotated[
        int, number(Range(0, 2**31 - 1, is_whole=True), "The same one gives the same requests and times", panel=WHAT)
    ] = 0

    slo_ttft_ms: Annotated[
        float | None, number(MILLISECONDS, "First token, for goodput", metavar="MS", panel=GOALS)
    ] = None
    slo_tpot_ms: Annotated[
        float | None, number(MILLISECONDS, "Each token after it, for goodput", metavar="MS", panel=GOALS)
    ] = None
    slo_e2e_ms: Annotated[
        float | None, number(MILLISECONDS, "The whole request, for goodput", metavar="MS", panel=GOALS)
    ] = None
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures, and every request, to FILE.")] = None

    def check(self) -> None:
        """Raises: ConfigError."""
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate (an open loop) and --concurrency (a closed one) exclude each other")
        check_folders(self.json)
