"""The table of guessers by kind of text, as Markdown and as a picture.

Knows its rows; must not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path

from simulation.report import Axes, drawing

AXES_A_LINE = 4
BAR, BEST, NOTE = "#9fc3e4", "#2e7d4f", "#666"


@dataclass(frozen=True, slots=True)
class Row:
    """One way of guessing on one workload."""

    workload: str
    way: str
    acceptance: float
    """Share of verified guesses that were accepted."""
    tokens_a_pass: float
    over_plain: float
    """Tokens per second over those of plain decoding."""
    accepted: Mapping[str, int] = field(default_factory=dict)
    """Number of accepted guesses, by source."""
    guess_us: float | None = None
    """Microseconds per guess; None for a draft, which runs on its own device."""
    memory_kb: float | None = None
    alpha: float | None = None
    promised: float | None = None
    """Tokens per pass by Theorem 3.8, for chains drafted and verified in turn."""
    in_turn: float | None = None
    """Measured tokens per pass, for the same chains."""

    @property
    def settings(self) -> Mapping[str, object]:
        """All known figures, for the settings of a `Result`."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        named = {name: round(value, 3) for name, value in known.items() if isinstance(value, float)}
        return {**named, "accepted_by_source": dict(self.accepted)}


MEASURES: Mapping[str, Callable[[Row], str]] = {
    "Tokens a second, over plain decoding": lambda row: f"{row.over_plain:.2f}",
    "Tokens a pass": lambda row: f"{row.tokens_a_pass:.2f}",
    "Share of verified guesses that were accepted": lambda row: f"{row.acceptance:.2f}",
    "α: tokens a pass that Theorem 3.8 promises, and measured in turn": lambda row: (
        "" if row.alpha is None else f"{row.alpha:.2f}: {row.promised:.2f}, {row.in_turn:.2f}"
    ),
    "A guess in µs, memory of a session in kB": lambda row: (
        "" if row.guess_us is None else f"{row.guess_us:.0f}, {row.memory_kb:.0f}"
    ),
}
"""Cells by measure; each measure has its own table."""
Cells = Mapping[tuple[str, str], str]
"""Text of each cell, by line and column."""


def table(rows: Sequence[Row]) -> str:
    """One table per measure, and one of the sources of accepted guesses under the automatic choice."""
    parts: dict[str, Cells] = {
        caption: {(row.way, row.workload): text for row in rows if (text := cell(row))}
        for caption, cell in MEASURES.items()
    }
    parts["Of the tokens that `automatic` guessed right, by source"] = _shares(rows)
    return "\n".join(line for caption, cells in parts.items() for line in _lines(caption, cells))


def _shares(rows: Sequence[Row]) -> Cells:
    chosen = [(row, sum(row.accepted.values())) for row in rows if row.way == "automatic"]
    return {
        (source, row.workload): f"{count / whole:.0%}"
        for row, whole in chosen
        for source, count in row.accepted.items()
        if count
    }


def _lines(caption: str, cells: Cells) -> Iterator[str]:
    lines, columns = (list(dict.fromkeys(each)) for each in zip(*cells, strict=True))
    yield f"{caption}:\n"
    yield f"| | {' | '.join(columns)} |"
    yield "| --- " * (1 + len(columns)) + "|"
    for line in lines:
        name = line if " " in line else f"`{line}`"
        yield f"| {name} | {' | '.join(cells.get((line, column), '') for column in columns)} |"
    yield ""


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw a picture: axes for each workload, a bar for each way of guessing."""
    titles = list(dict.fromkeys(row.workload for row in rows))
    num_lines = ceil(len(titles) / AXES_A_LINE)
    with drawing(file, num_lines, AXES_A_LINE, (12, 2.8 * num_lines)) as lines:
        free = [axes for line in lines for axes in line]
        for axes, title in zip(free, titles, strict=False):
            _draw_bars(axes, title, [row for row in rows if row.workload == title])
        for axes in free[len(titles) :]:
            axes.set_axis_off()


def _draw_bars(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """Draw tokens per second over plain decoding, which is the line at 1; the best bar is green."""
    factors = [row.over_plain for row in rows]
    colors = [BEST if factor == max(factors) else BAR for factor in factors]
    bars = axes.barh([row.way for row in rows], factors, color=colors)
    axes.bar_label(bars, [f"{factor:.2f}" for factor in factors], padding=3)
    axes.axvline(1.0, color=NOTE, linewidth=1)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
