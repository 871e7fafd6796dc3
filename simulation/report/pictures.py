"""Pictures drawn with matplotlib: setup and saving, and the pictures of `outrider simulate` and of clusters.

matplotlib is optional, and imported only when something is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from core.errors import ConfigError
from simulation.report.comparison import Comparison
from simulation.report.day import ROLES, Moment

FORMATS = (".svg", ".png", ".pdf")
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "savefig.dpi": 150,
    "text.parse_math": False,  # a token may be $
    "svg.fonttype": "none",  # keep text as text, not as outlines
    "svg.hashsalt": "outrider",  # the same figures give the same file
}
NUM_SCALING_AXES = 1 + len(ROLES)
UNITS = ((7200.0, 3600.0, "h"), (600.0, 60.0, "min"), (0.0, 1.0, "s"))
"""(smallest duration in seconds for which the unit is used, seconds per unit, name of the unit)."""
Axes: TypeAlias = Any
"""matplotlib's Axes."""
Points: TypeAlias = Sequence[tuple[float, float]]


def check_pictures(*files: Path | None) -> None:
    """Raises: ConfigError if one of these files cannot be drawn."""
    for file in files:
        if file is not None and file.suffix not in FORMATS:
            raise ConfigError(f"cannot draw {file}: the name of a picture ends in {', '.join(FORMATS)}")
        if file is not None and find_spec("matplotlib") is None:
            raise ConfigError(f"cannot draw {file} without matplotlib: pip install 'outrider[pictures]'")


@contextmanager
def drawing(
    file: Path, rows: int, columns: int, inches: tuple[float, float], **grid: Any
) -> Iterator[list[list[Axes]]]:
    """Axes to draw on, by row and column. The picture is saved when the context ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # tokens may be of any script; an SVG viewer has its own fonts
        figure = Figure(inches, layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid).tolist()
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def draw_lines(
    axes: Axes, title: str, x_name: str, lines: Mapping[str, Points], levels: Mapping[str, float] | None = None
) -> None:
    """Draw named lines, and dashed horizontal `levels`.

    Values of x are drawn at equal distances, so that powers of two are evenly spread.
    """
    x_values = sorted({x for points in lines.values() for x, _ in points})
    for name, points in lines.items():
        axes.plot([x_values.index(x) for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
    for index, (name, y) in enumerate((levels or {}).items()):
        axes.axhline(y, linestyle="--", color=f"C{len(lines) + index}", label=name)
    axes.set_xticks(range(len(x_values)), [f"{x:g}" for x in x_values])
    axes.set(title=title, xlabel=x_name)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def draw_speed(axes: Sequence[Axes], comparison: Comparison, by_streams: Mapping[str, Points]) -> None:
    """Draw rates by draft length, and by number of streams, on two axes."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in comparison.sequential:
        lines.setdefault(f"in turn, {run.verification.value}", []).append((run.gamma or 0, run.rate))
    levels = {name: run.rate for name, run in zip(("plain", "pipelined"), comparison.runs[::2], strict=True)}
    draw_lines(axes[0], "tokens/s of one stream", "draft length γ", lines, levels)
    titles = {"sequential": "in turn"}
    named = {titles.get(name, name): points for name, points in by_streams.items()}
    draw_lines(axes[1], "tokens/s of all streams", "streams at a time", named)


def draw_scaling(axes: Sequence[Axes], moments: Sequence[Moment]) -> None:
    """Draw the load and the replicas of each deployment on NUM_SCALING_AXES axes."""
    began_s = moments[0].at_s
    _, unit_s, unit = next(each for each in UNITS if moments[-1].at_s - began_s >= each[0])
    times = [(moment.at_s - began_s) / unit_s for moment in moments]
    counts = {"sessions": [moment.num_sessions for moment in moments]}
    counts |= {f"{role} replicas": [moment.num_replicas[role] for moment in moments] for role in ROLES}
    for index, (each, (title, values)) in enumerate(zip(axes, counts.items(), strict=True)):
        each.step(times, values, where="post", color=f"C{index}")
        each.set_title(title, loc="left")
        each.set_ylim(bottom=0)
        each.yaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel(unit)
