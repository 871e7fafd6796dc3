"""Draws what `outrider simulate` has found: speed by draft length, and by how many streams there are.

Knows comparisons and canvases; must not know how the figures were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from core.canvas import Canvas
from simulation.report.comparison import Comparison

COLORS = {
    "plain": "#8a9099",
    "pipelined": "#c2543c",
    "sequential": "#3b7dbd",
}
RULE_COLORS = ("#3b7dbd", "#4c9f70", "#b58900", "#7a5195", "#6b8e9e")
"""Of rules of verification, in the order in which they were tried; with more rules they come again."""
WIDTH_PX, HEIGHT_PX = 360, 240
LEFT_PX, TOP_PX, RIGHT_PX, BOTTOM_PX = 56, 36, 20, 44
LABEL_PX = 104
TICKS = (1, 2, 5)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One way, named at its right end."""

    name: str
    points: Points
    color: str
    is_level: bool = False
    """The same for every x."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram; y begins at 0."""

    title: str
    x_name: str
    x_values: Sequence[int]
    lines: Sequence[Line]


def speed_picture(comparison: Comparison, by_streams: Mapping[str, Points]) -> str:
    """The text of the SVG file."""
    panels = [_by_gamma(comparison), _by_streams(by_streams)]
    step = LEFT_PX + WIDTH_PX + LABEL_PX + RIGHT_PX
    canvas = Canvas(step * len(panels), TOP_PX + HEIGHT_PX + BOTTOM_PX)
    for number, panel in enumerate(panels):
        with canvas.moved(number * step + LEFT_PX, TOP_PX):
            _Drawing(panel).draw(canvas)
    return str(canvas)


def _by_gamma(comparison: Comparison) -> Panel:
    gammas = sorted({run.gamma or 0 for run in comparison.sequential})
    lines = [
        _level(name, run.rate, gammas) for name, run in zip(("plain", "pipelined"), comparison.runs[::2], strict=True)
    ]
    tried = dict.fromkeys(run.verification for run in comparison.sequential)
    for verification, color in zip(tried, cycle(RULE_COLORS), strict=False):
        points = [(run.gamma or 0, run.rate) for run in comparison.sequential if run.verification is verification]
        lines.append(Line(f"in turn, {verification.value}", points, color))
    return Panel("tokens/s of one stream", "draft length γ", gammas, lines)


def _level(name: str, rate: float, x_values: Sequence[int]) -> Line:
    return Line(name, [(x, rate) for x in (x_values[0], x_values[-1])], COLORS[name], is_level=True)


def _by_streams(by_streams: Mapping[str, Points]) -> Panel:
    titles = {"sequential": "in turn"}
    lines = [Line(titles.get(name, name), points, COLORS[name]) for name, points in by_streams.items()]
    x_values = [round(x) for x, _ in next(iter(by_streams.values()))]
    return Panel("tokens/s of all streams", "streams at a time", x_values, lines)


class _Drawing:
    """One panel, its origin at the top left of the plot area."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._most = 1.05 * max(y for line in panel.lines for _, y in line.points)
        self._places = {x: index for index, x in enumerate(panel.x_values)}

    def draw(self, canvas: Canvas) -> None:
        canvas.text(0, -14, self._panel.title, font_weight="bold")
        step = _step(self._most)
        for number in range(int(self._most / step) + 1):
            canvas.grid_line(self._y(number * step), WIDTH_PX, f"{number * step:g}")
        for x in self._panel.x_values:
            canvas.text(self._x(x), HEIGHT_PX + 16, f"{x}", "middle")
        canvas.text(WIDTH_PX / 2, HEIGHT_PX + 34, self._panel.x_name, "middle")
        for line, label_y in zip(self._panel.lines, self._label_ys(), strict=True):
            self._line(canvas, line)
            canvas.text(WIDTH_PX + 8, label_y + 4, line.name, style=f"fill:{line.color}")

    def _line(self, canvas: Canvas, line: Line) -> None:
        places = [(self._x(x), self._y(y)) for x, y in line.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = {"stroke_dasharray": "5 3"} if line.is_level else {}
        canvas.path(path, fill="none", stroke=line.color, stroke_width=2, **dashes)
        if not line.is_level:
            for (x, y), (_, value) in zip(places, line.points, strict=True):
                canvas.circle(x, y, 3, f"{value:.1f}", fill=line.color)

    def _label_ys(self) -> list[float]:
        """Where the lines end, moved apart where they are too close to be read."""
        ends = [self._y(line.points[-1][1]) for line in self._panel.lines]
        found = list(ends)
        lowest = -1e9
        for index in sorted(range(len(ends)), key=lambda index: ends[index]):
            found[index] = lowest = max(ends[index], lowest + 13)
        return found

    def _x(self, x: float) -> float:
        """Values stand at equal distances, so that powers of two can be told apart."""
        return (self._places[round(x)] + 0.5) * WIDTH_PX / len(self._places)

    def _y(self, y: float) -> float:
        return HEIGHT_PX * (1.0 - y / self._most)


def _step(most: float) -> float:
    """A round number that goes into `most` four to ten times."""
    scale = 1.0
    while True:
        for tick in TICKS:
            if most / (tick * scale) <= 8:
                return tick * scale
        scale *= 10.0
