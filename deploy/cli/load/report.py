"""The figures as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deploy.cli.load.options import BenchOptions
from deploy.cli.load.records import RequestRecord
from deploy.cli.load.summary import PERCENTILES, Objectives, Summary

NAMES = {
    "ttft": "first token (TTFT)",
    "itl": "between pieces (ITL)",
    "tpot": "per token after the first (TPOT)",
    "e2e": "whole request (E2E)",
}
MS = 1e3
LATE_S = 0.01
"""Delay of the client (p99), in seconds, above which the report warns."""


def table(summary: Summary, objectives: Objectives) -> str:
    return "\n".join([*_lines(summary, objectives), ""])


def _lines(summary: Summary, objectives: Objectives) -> Iterator[str]:
    counted = ", ".join(f"{number} {outcome}" for outcome, number in summary.outcomes.items())
    yield f"{counted} in {summary.duration_s:.2f} s"
    for error, number in summary.errors.items():
        yield f"  {number} x {error}"
    yield f"{'ms':34}{'mean':>10}" + "".join(f"{f'p{each}':>10}" for each in PERCENTILES) + f"{'max':>10}"
    for name, latency in summary.latencies.items():
        row = (latency.mean_s, *latency.percentiles_s.values(), latency.max_s)
        yield f"{NAMES[name]:34}" + "".join(f"{value * MS:10.1f}" for value in row)
    yield f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s"
    if objectives != Objectives():
        yield f"goodput {summary.goodput_per_s:.2f} requests/s: {summary.good_share:.1%} met the objectives"
    yield from _speculation(summary)
    if summary.lateness_s > LATE_S:
        yield f"this client sent up to {summary.lateness_s * MS:.0f} ms late (p99): it may be the bottleneck"


def _speculation(summary: Summary) -> Iterator[str]:
    figures = []
    if summary.acceptance is not None:
        figures.append(f"{summary.acceptance:.1%} of guesses accepted")
    if summary.tokens_per_pass is not None:
        figures.append(f"{summary.tokens_per_pass:.2f} tokens a target pass")
    if figures:
        yield ", ".join(figures)


def as_document(options: BenchOptions, summary: Summary, records: Sequence[RequestRecord]) -> str:
    """One JSON object with the options, the figures and every request; all times in seconds."""
    figures = {
        **asdict(summary),
        "requests_per_s": summary.requests_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
    }
    requests = [_request(record) for record in records]
    return json.dumps({"options": asdict(options), "summary": figures, "requests": requests}, default=str) + "\n"


def _request(record: RequestRecord) -> Mapping[str, Any]:
    return {
        "index": record.index,
        "outcome": record.outcome,
        "error": record.error,
        "intended_s": record.intended_s,
        "sent_s": record.sent_s,
        "ended_s": record.ended_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
    }
