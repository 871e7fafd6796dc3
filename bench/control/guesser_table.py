"""The table of guessers by kind of text, as Markdown and as a picture.

Knows its rows and canvases; must not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil

from core.canvas import Canvas

PANEL_PX, PANELS_A_LINE, LABEL_PX, BAR_PX, LINE_PX, HEAD_PX, TITLE_PX = 300, 4, 110, 140, 17, 28, 34
BAR, BEST, NOTE = "#9fc3e4", "#2e7d4f", "#666"


@dataclass(frozen=True, slots=True)
class Row:
    """One way of guessing on one workload."""

    workload: str
    way: str
    acceptance: float
    """Share of the guesses that were verified."""
    tokens_a_pass: float
    over_plain: float
    """Tokens a second, over those of plain decoding."""
    accepted: Mapping[str, int] = field(default_factory=dict)
    """Guesses, by source."""
    guess_us: float | None = None
    """None of a draft, whose guesses are passes on a device of its own."""
    memory_kb: float | None = None
    alpha: float | None = None
    promised: float | None = None
    """Tokens a pass, by Theorem 3.8, of chains that are drafted and verified in turn."""
    in_turn: float | None = None
    """The same, measured."""

    @property
    def settings(self) -> Mapping[str, object]:
        """All other figures that there are."""
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
"""Each has a table of its own."""
Cells = Mapping[tuple[str, str], str]
"""By line and column."""


def table(rows: Sequence[Row]) -> str:
    """A table for each measure, and one of the sources that the automatic choice lived on."""
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


def picture(rows: Sequence[Row]) -> str:
    """The text of an SVG file: a panel for each workload, a bar for each way of guessing."""
    titles = list(dict.fromkeys(row.workload for row in rows))
    panels = [[row for row in rows if row.workload == title] for title in titles]
    panel_height_px = HEAD_PX + LINE_PX * (1 + max(map(len, panels)))
    canvas = Canvas(PANEL_PX * PANELS_A_LINE, TITLE_PX + panel_height_px * ceil(len(titles) / PANELS_A_LINE))
    canvas.text(14, 20, "Tokens a second over plain decoding (the line); the best of each kind in green", fill=NOTE)
    px_a_factor = BAR_PX / max(row.over_plain for row in rows)
    for number, panel in enumerate(panels):
        x, y = PANEL_PX * (number % PANELS_A_LINE), TITLE_PX + panel_height_px * (number // PANELS_A_LINE)
        with canvas.moved(x, y):
            _draw_panel(canvas, panel, px_a_factor)
    return str(canvas)


def _draw_panel(canvas: Canvas, rows: Sequence[Row], px_a_factor: float) -> None:
    canvas.text(14, 18, rows[0].workload, font_weight="bold")
    best = max(row.over_plain for row in rows)
    for number, row in enumerate(rows):
        y = HEAD_PX + LINE_PX * number
        width_px, color = row.over_plain * px_a_factor, BEST if row.over_plain == best else BAR
        canvas.text(LABEL_PX - 6, y + 11, row.way, "end")
        canvas.rect(LABEL_PX, y, width_px, LINE_PX - 4, fill=color)
        canvas.text(LABEL_PX + width_px + 4, y + 11, f"{row.over_plain:.2f}", fill=NOTE)
    plain_px = LABEL_PX + px_a_factor
    canvas.path(f"M{plain_px:.1f} {HEAD_PX - 2}V{HEAD_PX + LINE_PX * len(rows)}", stroke=NOTE)
