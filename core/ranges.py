"""Ranges of numeric parameters. A dataclass field declares its range and its help text (`parameter`).

The proto's comments repeat the ranges; tests/protos/test_comments.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from core.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, and 0 if it has a meaning of its own."""

    low: float
    high: float
    excludes_low: bool = False
    zero: str = ""
    """Meaning of 0, if 0 is allowed although it is outside the range."""
    is_whole: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = self.low < value if self.excludes_low else self.low <= value
        return (is_above and value <= self.high) or (bool(self.zero) and value == 0)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{'above' if self.excludes_low else 'at least'} {self.low:g}"
        ends = ", ".join(str(int(end)) if float(end).is_integer() else f"{end:g}" for end in (self.low, self.high))
        within = f"in {'(' if self.excludes_low else '['}{ends}]"
        return f"0 ({self.zero}) or {within}" if self.zero else within


def parameter(default: Any, allowed: Range, text: str = "") -> Any:
    """Declare a dataclass field whose value is in a range, or None. `text` describes it in a command's help."""
    return field(default=default, metadata={"range": allowed, "text": text})


@cache
def ranges_of(record: type[DataclassInstance]) -> Mapping[str, Range]:
    """Ranges of a dataclass's parameters, by name."""
    return {each.name: each.metadata["range"] for each in fields(record) if "range" in each.metadata}


def text_of(record: type[DataclassInstance], name: str) -> str:
    return next(str(each.metadata["text"]) for each in fields(record) if each.name == name)


def check_parameters(record: DataclassInstance) -> None:
    """Raises: InvalidRequest, which names the first parameter outside its range."""
    for name, allowed in ranges_of(type(record)).items():
        if (value := getattr(record, name)) is not None:
            check(name, value, allowed)


def check(name: str, value: float, allowed: Range) -> None:
    """Raises: InvalidRequest, which names the field and the range."""
    if allowed.is_whole and not isinstance(value, int):
        raise InvalidRequest(name, f"must be a whole number, got {value!r}")
    if value not in allowed:
        raise InvalidRequest(name, f"must be {allowed}, got {shown(value)}")


def shown(value: object) -> str:
    """Format a value for an error. A -1 sent in an unsigned field arrives as 4294967295, so both are shown."""
    if isinstance(value, int) and 2**31 <= value < 2**32:
        return f"{value} ({value - 2**32} as an unsigned 32-bit number)"
    return repr(value)
