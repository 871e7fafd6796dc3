"""One record type for every measured or simulated figure, readable by people and scripts.

Knows names, values, units and goals; must not know what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `goal` and `met` are None if there is no goal."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    met: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def at_least(goal: float, result: Result) -> Result:
    """Return `result` with a goal to reach or exceed."""
    return replace(result, goal=goal, met=result.value >= goal)


def at_most(goal: float, result: Result) -> Result:
    """Return `result` with a goal not to exceed."""
    return replace(result, goal=goal, met=result.value <= goal)


def as_json(results: Sequence[Result]) -> str:
    """Return a JSON list of objects with the fields of `Result`."""
    return json.dumps([asdict(result) for result in results], indent=2) + "\n"
