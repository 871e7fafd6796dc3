"""Bars of tokens per second, a picture for each number of streams and kind of prompts, and the same as a table.

Knows results of `bench.peers.peers` by their names; must not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.results import Result
from simulation.report import Axes, drawing

AXES_A_LINE = 3
OURS, THEIRS = "#2e7d4f", "#9fc3e4"

Speeds = Mapping[str, Mapping[str, float]]
"""Tokens per second by case and side."""


def speeds_of(results: Sequence[Result]) -> Speeds:
    """Speeds among the results, whose names are "side: case"."""
    found: dict[str, dict[str, float]] = {}
    for result in results:
        if result.unit == "tokens/s":
            side, case = result.name.split(": ")
            found.setdefault(case, {})[side] = result.value
    return found


def table(speeds: Speeds) -> str:
    """Markdown: a line for each side, a column for each case."""
    sides = list(dict.fromkeys(side for case in speeds.values() for side in case))
    lines = [["tokens a second", *speeds], ["---"] * (1 + len(speeds))]
    lines += [[side, *(f"{case[side]:.0f}" if side in case else "" for case in speeds.values())] for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(speeds: Speeds, file: Path) -> None:
    num_lines = -(-len(speeds) // AXES_A_LINE)
    with drawing(file, num_lines, AXES_A_LINE, (12, 2.6 * num_lines)) as lines:
        free = [axes for line in lines for axes in line]
        for axes, (case, sides) in zip(free, speeds.items(), strict=False):
            _draw_bars(axes, case, sides)
        for axes in free[len(speeds) :]:
            axes.set_axis_off()


def _draw_bars(axes: Axes, case: str, sides: Mapping[str, float]) -> None:
    bars = axes.barh([*sides], [*sides.values()], color=[OURS if side.startswith("ours") else THEIRS for side in sides])
    axes.bar_label(bars, [f"{speed:.0f}" for speed in sides.values()], padding=3)
    axes.invert_yaxis()
    axes.set_title(case, loc="left")
