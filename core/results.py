"""One form for every figure that is measured or simulated, for people and for scripts.

Knows names, values, units and goals; must not know what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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


def at_least(goal: float, result: Result) -> Result:
    """The same figure, judged: the goal is reached from below."""
    return replace(result, goal=goal, met=result.value >= goal)


def at_most(goal: float, result: Result) -> Result:
    """The same figure, judged: the goal is reached from above."""
    return replace(result, goal=goal, met=result.value <= goal)


def as_json(results: Sequence[Result]) -> str:
    """A list of objects with the fields of `Result`."""
    return json.dumps([asdict(result) for result in results], indent=2) + "\n"
