"""Draws the results of `outrider simulate`: speed by draft length, and by the number of streams.

Knows comparisons and diagrams; must not know how the figures were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from simulation.report.comparison import Comparison
from simulation.report.panels import Line, Panel, Points, picture

COLORS = {
    "plain": "#8a9099",
    "pipelined": "#c2543c",
    "sequential": "#3b7dbd",
}
RULE_COLORS = ("#3b7dbd", "#4c9f70", "#b58900", "#7a5195", "#6b8e9e")
"""Of rules of verification, in the order in which they were tried; with more rules they come again."""


def speed_picture(comparison: Comparison, by_streams: Mapping[str, Points]) -> str:
    """The text of the SVG file."""
    return picture([_by_gamma(comparison), _by_streams(by_streams)])


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
