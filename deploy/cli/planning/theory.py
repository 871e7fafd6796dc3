"""`outrider theory`: the gain of speculation by closed forms, for acceptance rates and a cost that you give.

Knows options and tables; `core.theory` has the formulas. Imports neither Ray nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from core.ranges import Range
from core.results import Result, as_json
from core.theory import (
    MAX_GAMMA,
    expected_longest,
    expected_tokens,
    guaranteed_factor,
    memory_factor,
    operations_factor,
    optimal_gamma,
    oracle_factor,
    pipelined_factor,
    walltime_factor,
)
from deploy.cli.options import Numbers, check_folders, number, numbers
from simulation.report import check_pictures, draw_lines, drawing

MOST_ALPHA = 0.999
"""Largest acceptance rate. At 1 most of the figures are infinite."""
DRAWN_GAMMAS = range(17)


@dataclass(frozen=True, kw_only=True)
class TheoryOptions:
    """Compute the gain of speculation by closed forms, for acceptance rates and costs that you give.

    Assumes that guesses are accepted independently of each other, and that verifying them takes as long as one token.
    """

    alpha: Annotated[Numbers, numbers(Range(0, MOST_ALPHA), "Acceptance rate of a guess", metavar="A[,A...]")]
    c: Annotated[float, number(Range(0, 100), "Duration of a draft pass divided by that of a target pass", metavar="C")]
    gamma: Annotated[
        int | None,
        number(
            Range(0, MAX_GAMMA, is_whole=True),
            "Draft length; by default, for each alpha, the best one without pipelining",
        ),
    ] = None
    c_operations: Annotated[
        float, number(Range(0, 100), "Operations per token of the draft divided by those of the target", metavar="C")
    ] = 0.0
    hit_rate: Annotated[
        float, number(Range(0, 1), "Share of pipelined rounds whose draft was ready", metavar="SHARE")
    ] = 1.0
    drafts: Annotated[int, number(Range(1, 1024, is_whole=True), "Independent drafts side by side")] = 1
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures to FILE.")] = None
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Draw the factors by draft length: .svg, .png or .pdf.")
    ] = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    unit: str
    of: Callable[[float], float]
    """Value of the figure for an acceptance rate."""
    digits: int = 2


def theory(options: TheoryOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    check_folders(options.json, options.svg)
    check_pictures(options.svg)
    sys.stdout.write("\n".join([*lines(options), ""]))
    if options.json is not None:
        options.json.write_text(as_json(results(options)))
    if options.svg is not None:
        draw(options, options.svg)
    return 0


def figures(options: TheoryOptions) -> Sequence[Figure]:
    """The figures of the table, from top to bottom."""
    c, hit_rate = options.c, options.hit_rate

    def in_turn(alpha: float) -> Callable[[int], float]:
        return partial(walltime_factor, alpha, c=c)

    def hidden(alpha: float) -> Callable[[int], float]:
        return partial(pipelined_factor, alpha, c=c, hit_rate=hit_rate)

    def gamma(alpha: float) -> int:
        return optimal_gamma(in_turn(alpha)) if options.gamma is None else options.gamma

    return (
        Figure("gamma", "", gamma, 0),
        Figure("tokens a round", "tokens", lambda alpha: expected_tokens(alpha, gamma(alpha))),
        Figure(
            f"guesses accepted of the best of {options.drafts} draft(s)",
            "tokens",
            lambda alpha: expected_longest(alpha, gamma(alpha), options.drafts),
        ),
        Figure("in turn", "x", lambda alpha: in_turn(alpha)(gamma(alpha))),
        Figure("pipelined", "x", lambda alpha: hidden(alpha)(gamma(alpha))),
        Figure("operations a token", "x", lambda alpha: operations_factor(alpha, gamma(alpha), options.c_operations)),
        Figure("memory accesses a token", "x", lambda alpha: memory_factor(alpha, gamma(alpha))),
        Figure("in turn, best gamma", "", lambda alpha: optimal_gamma(in_turn(alpha)), 0),
        Figure("in turn, at that", "x", lambda alpha: _best(in_turn(alpha))),
        Figure("in turn, at least (corollary 3.9)", "x", lambda alpha: guaranteed_factor(alpha, c)),
        Figure("in turn, at most (oracle for gamma)", "x", lambda alpha: oracle_factor(alpha, c)),
        Figure("pipelined, best gamma", "", lambda alpha: optimal_gamma(hidden(alpha)), 0),
        Figure("pipelined, at that", "x", lambda alpha: _best(hidden(alpha))),
    )


def _best(factor: Callable[[int], float]) -> float:
    return factor(optimal_gamma(factor))


def lines(options: TheoryOptions) -> Iterator[str]:
    """The table: a line for each figure, a column for each acceptance rate."""
    yield f"c = {options.c:g}, hit rate {options.hit_rate:g}; x: times plain decoding; gammas up to {MAX_GAMMA}"
    found = figures(options)
    names = [f"{figure.name}, {figure.unit}" if figure.unit == "x" else figure.name for figure in found]
    width = max(map(len, names))
    yield " ".join(["alpha".ljust(width), *(f"{alpha:>8g}" for alpha in options.alpha.values)])
    for name, figure in zip(names, found, strict=True):
        cells = (f"{figure.of(alpha):>8.{figure.digits}f}" for alpha in options.alpha.values)
        yield " ".join([name.ljust(width), *cells])


def results(options: TheoryOptions) -> list[Result]:
    """The same figures, for --json; each has its alpha."""
    settings = {"c": options.c, "c_operations": options.c_operations, "hit_rate": options.hit_rate}
    return [
        Result(figure.name, round(figure.of(alpha), 6), figure.unit, settings={"alpha": alpha, **settings})
        for alpha in options.alpha.values
        for figure in figures(options)
    ]


def draw(options: TheoryOptions, file: Path) -> None:
    """A picture of the factors by draft length, in turn and pipelined."""
    ways = {
        "in turn": partial(walltime_factor, c=options.c),
        "pipelined": partial(pipelined_factor, c=options.c, hit_rate=options.hit_rate),
    }
    with drawing(file, 1, 2, (11, 4)) as (row,):
        for axes, (name, factor) in zip(row, ways.items(), strict=True):
            lines = {
                f"alpha {alpha:g}": [(gamma, factor(alpha, gamma)) for gamma in DRAWN_GAMMAS]
                for alpha in options.alpha.values
            }
            draw_lines(axes, f"{name}, times plain decoding", "draft length γ", lines)
