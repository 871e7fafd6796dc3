"""One list of results for every benchmark, for people and for scripts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `goal` and `met` are None where nothing was promised."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    met: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def spread(name: str, values: Sequence[float], unit: str, **settings: Any) -> Result:
    """The median of repeated measurements; minimum, maximum and count go into the settings."""
    extent = {"min": round(min(values), 3), "max": round(max(values), 3), "num_runs": len(values)}
    return Result(name, round(statistics.median(values), 3), unit, settings={**extent, **settings})


def at_least(goal: float, result: Result) -> Result:
    """The same figure, judged: the goal is reached from below."""
    return replace(result, goal=goal, met=result.value >= goal)


def at_most(goal: float, result: Result) -> Result:
    """The same figure, judged: the goal is reached from above."""
    return replace(result, goal=goal, met=result.value <= goal)


def report(results: Sequence[Result], path: Path | None) -> None:
    """Print the results as a table, and write them to `path` as JSON."""
    width = max(len(result.name) for result in results)
    for result in results:
        goal = "" if result.goal is None else f"  goal {result.goal:g}: {'met' if result.met else 'MISSED'}"
        settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
        print(f"{result.name:<{width}}  {result.value:>9.3f} {result.unit:<8}{goal}  {settings}")
    if path is not None:
        path.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
