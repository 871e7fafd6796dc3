"""Draws sessions and replicas over time: of a simulated day, or of a cluster under `python -m bench cluster`.

Knows moments and canvases; must not know how they were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.canvas import Canvas
from simulation.report.day import Moment

COLORS = {"orchestrator": "#4c9f70", "draft": "#3b7dbd", "target": "#c2543c"}
SESSIONS_COLOR = "#8a9099"
WIDTH_PX, PANEL_PX, GAP_PX = 640, 90, 34
LEFT_PX, TOP_PX, LABEL_PX = 40, 24, 110
TICKS = ((30, 1, "s"), (60, 60, "min"), (600, 60, "min"), (7200, 3600, "h"), (86_400, 3600, "h"))
"""Distance of ticks in seconds, and the unit they are labelled in, from the finest."""
MAX_TICKS = 16


def scaling_picture(moments: Sequence[Moment]) -> str:
    """The text of the SVG file: one panel for the load, one for each deployment, over the same time."""
    panels = [_Panel("sessions", SESSIONS_COLOR, moments, lambda moment: moment.num_sessions)]
    panels += [_Panel(f"{role} replicas", color, moments, _replicas_of(role)) for role, color in COLORS.items()]
    width = LEFT_PX + WIDTH_PX + LABEL_PX
    height = TOP_PX + (PANEL_PX + GAP_PX) * len(panels)
    canvas = Canvas(width, height)
    for number, panel in enumerate(panels):
        with canvas.moved(LEFT_PX, TOP_PX + number * (PANEL_PX + GAP_PX)):
            panel.draw(canvas)
    return str(canvas)


def _replicas_of(role: str) -> Callable[[Moment], float]:
    return lambda moment: moment.num_replicas[role]


class _Panel:
    """One count over time, its origin at the top left of the plot area."""

    def __init__(self, title: str, color: str, moments: Sequence[Moment], count: Callable[[Moment], float]) -> None:
        self._title = title
        self._color = color
        self._began_s = moments[0].at_s
        self._duration_s = max(moments[-1].at_s - self._began_s, 1.0)
        self._points = [(moment.at_s - self._began_s, count(moment)) for moment in moments]
        self._most = max(1, *(value for _, value in self._points))

    def draw(self, canvas: Canvas) -> None:
        for value in sorted({0, self._most}):
            canvas.grid_line(self._y(value), WIDTH_PX, f"{value:g}")
        tick_s, unit_s, unit = next(each for each in TICKS if self._duration_s / each[0] <= MAX_TICKS)
        for number in range(int(self._duration_s / tick_s) + 1):
            at_s = number * tick_s
            canvas.text(self._x(at_s), PANEL_PX + 14, f"{at_s / unit_s:g} {unit}", "middle", fill=SESSIONS_COLOR)
        canvas.path(self._steps(), fill="none", stroke=self._color, stroke_width=2)
        canvas.text(WIDTH_PX + 8, self._y(self._points[-1][1]) + 4, self._title, fill=self._color)

    def _steps(self) -> str:
        """A count keeps its value until the next moment."""
        first_s, first = self._points[0]
        path = [f"M{self._x(first_s):.1f} {self._y(first):.1f}"]
        path += [f"H{self._x(at_s):.1f}V{self._y(value):.1f}" for at_s, value in self._points[1:]]
        return "".join(path)

    def _x(self, at_s: float) -> float:
        return WIDTH_PX * at_s / self._duration_s

    def _y(self, value: float) -> float:
        return PANEL_PX * (1.0 - value / self._most)
