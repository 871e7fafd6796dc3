"""Output of every benchmark: progress lines, and one list of results, printed and written to a file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from core.results import Result, as_json, at_least, at_most

__all__ = ["Result", "at_least", "at_most", "named", "report", "say", "spread"]

T = TypeVar("T")


def say(line: str) -> None:
    """Print a line of progress immediately, also to a file or pipe."""
    print(f"... {line}", flush=True)


def named(text: str, each: Iterable[T], name_of: Callable[[T], str] = str) -> list[T]:
    """The elements whose name contains `text`. Raises: SystemExit, listing all names, if there are none."""
    names = {name_of(one): one for one in each}
    if found := [one for name, one in names.items() if text in name]:
        return found
    raise SystemExit(f"no name contains {text!r}; there are: {', '.join(names)}")


def spread(name: str, values: Sequence[float], unit: str, **settings: Any) -> Result:
    """The median of repeated measurements, with minimum, maximum and count in the settings."""
    extent = {"min": round(min(values), 3), "max": round(max(values), 3), "num_runs": len(values)}
    return Result(name, round(statistics.median(values), 3), unit, settings={**extent, **settings})


def report(results: Sequence[Result], path: Path | None) -> None:
    """Print the results as a table, and write them to `path` as JSON."""
    width = max(len(result.name) for result in results)
    for result in results:
        goal = "" if result.goal is None else f"  goal {result.goal:g}: {'met' if result.met else 'MISSED'}"
        settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
        print(f"{result.name:<{width}}  {result.value:>9.3f} {result.unit:<8}{goal}  {settings}")
    if path is not None:
        path.write_text(as_json(results))
