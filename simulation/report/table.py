"""The results of `outrider simulate`: a table, a sentence of advice, and the same figures as `Result`s.

Knows comparisons; must not know how they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from core.results import Result
from simulation.measure import Percentiles, Report
from simulation.report.comparison import Comparison, Run

MIN_GAIN = 1.02
"""Smallest gain that is worth a second model."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    unit: str
    of: Callable[[Report], float]
    digits: int = 1


def _ms(name: str, of: Callable[[Report], Percentiles], *wanted: str) -> Iterator[Figure]:
    for which in wanted:
        yield Figure(f"{name}, {which}", "ms", lambda report, which=which: 1e3 * float(getattr(of(report), which)))  # type: ignore[misc]


FIGURES = (
    Figure("all streams", "tokens/s", lambda report: report.tokens_per_s),
    Figure("one stream, while it decodes", "tokens/s", lambda report: report.tokens_per_s_a_stream),
    *_ms("first token after", lambda report: report.ttft_s, "p50", "p95", "p99"),
    *_ms("between tokens", lambda report: report.inter_token_s, "mean", "p50", "p99"),
    *_ms("whole stream", lambda report: report.end_to_end_s, "p50", "p95", "p99"),
    Figure("target busy", "%", lambda report: 100 * report.target_utilisation),
    Figure("draft busy", "%", lambda report: 100 * report.draft_utilisation),
    Figure("tokens a round", "", lambda report: report.tokens_per_round, 2),
    Figure("guesses accepted", "%", lambda report: 100 * report.acceptance_rate),
    Figure("next block was ready", "%", lambda report: 100 * report.hit_rate),
    Figure("drafting hidden", "%", lambda report: 100 * report.time_hidden),
)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """The table: one line per figure, one column per way."""
    columns = [_title(run) for run in comparison.runs]
    names = [f"{figure.name}, {figure.unit}".rstrip(", ") for figure in FIGURES]
    width = max(map(len, names))
    yield "  ".join(["".ljust(width), *(column.rjust(len(column)) for column in columns)])
    for name, figure in zip(names, FIGURES, strict=True):
        cells = (f"{figure.of(run.report):.{figure.digits}f}" for run in comparison.runs)
        yield "  ".join(
            [name.ljust(width), *(cell.rjust(len(column)) for cell, column in zip(cells, columns, strict=True))]
        )
    if num_failed := sum(run.report.num_failed for run in comparison.runs):
        yield f"{num_failed} streams failed"


def _title(run: Run) -> str:
    if run.name != "sequential":
        return run.name.rjust(10)
    return f"in turn ({run.verification.value}, gamma {run.gamma})"


def advice_of(comparison: Comparison) -> str:
    """Advice in one or two sentences."""
    plain, in_turn, pipelined = comparison.runs
    best = max(comparison.runs, key=lambda run: run.rate)
    gain = best.rate / plain.rate
    if gain < MIN_GAIN:
        return f"Decode plainly: drafting gains nothing here ({gain:.2f}x at best)."
    if best is in_turn:
        how = f"{in_turn.gamma} guesses at a time, {in_turn.verification.value} verification"
        ratio = in_turn.rate / pipelined.rate
        return f"Draft and verify in turn ({how}): {gain:.2f}x of plain, {ratio:.2f}x of drafting behind verification."
    ratio, control = pipelined.rate / in_turn.rate, pipelined.report.control
    return (
        f"Draft behind verification: {gain:.2f}x of plain, {ratio:.2f}x of the best in turn (gamma {in_turn.gamma}). "
        f"The {control.policy} policy had up to {control.block_tokens} guesses, {control.draft_tokens} in a row."
    )


def comparison_results(comparison: Comparison, settings: Mapping[str, Any]) -> list[Result]:
    """Every figure of every way, and the rate of every draft length tried in turn."""
    found = [
        Result(f"{run.name}: {figure.name}", round(figure.of(run.report), 3), figure.unit, settings=_of(run, settings))
        for run in comparison.runs
        for figure in FIGURES
    ]
    found += [
        Result("tried in turn: one stream", round(run.rate, 3), "tokens/s", settings=_of(run, settings))
        for run in comparison.sequential
    ]
    plain, in_turn, pipelined = comparison.runs
    found.append(Result("pipelined over plain", round(pipelined.rate / plain.rate, 3), "x", settings=settings))
    found.append(Result("pipelined over sequential", round(pipelined.rate / in_turn.rate, 3), "x", settings=settings))
    return found


def _of(run: Run, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    if run.name == "pipelined":
        return settings
    return {**settings, "gamma": run.gamma, "verification": run.verification.value}
