"""The ranges of a request's numbers, each defined here and nowhere else.

Inside these ranges float32 holds. Logits of a real model stay below 1e4. A bias adds at most 100, the repetition
penalty multiplies by at most 10, and the other penalties subtract at most 2 and 2 for each occurrence: so scores stay
below 1e7, where float32 still represents every integer. Temperature divides the distance to the largest score, so the
largest is 0, and what overflows has probability zero. A row whose scores are NaN or infinite all the same is refused
(`core.exact.sampling.log_probs`, `workers.engine.target`).

The proto's comments repeat these ranges; tests/protos/test_comments.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from core.errors import InvalidRequest

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, and 0 where it has a meaning of its own."""

    low: float
    high: float
    excludes_low: bool = False
    zero: str = ""
    """The meaning of 0, where it is allowed beside the range."""
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


SAMPLING: Mapping[str, Range] = {
    "temperature": Range(0.001, 100.0, zero="greedy"),
    "top_k": Range(1, 2**31 - 1, zero="keeps all", is_whole=True),
    "top_p": Range(0.0, 1.0, excludes_low=True),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.1, 10.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "min_tokens": Range(0, 2**31 - 1, is_whole=True),
    "seed": Range(0, MAX_SEED, is_whole=True),
}
"""Of the fields of `core.records.Sampling`. A temperature below the range is refused, not taken for greedy: greedy is
0."""
LOGIT_BIAS = Range(-100.0, 100.0)
LENIENCE = Range(0.0, 1.0, excludes_low=True)
"""Of `GenerationRequest.lenience`."""
DRAFT_TEMPERATURE = Range(0.001, 100.0)
"""Of `GenerationRequest.draft_temperature`: as a temperature, but for 0, which is the target's to say."""
DRAFT_TOKENS = Range(0, 64, is_whole=True)
"""Of the most tokens drafted, a service's and a request's, which may ask for more than the service: both are bounds."""
PRIORITY = Range(-(2**31), 2**31 - 1, is_whole=True)
"""Of `GenerationRequest.priority`."""
QUOTA = Range(0, 2**31 - 1, is_whole=True)
"""Of the numbers of a `Quota`."""


def check(field: str, value: float, allowed: Range) -> None:
    """Raises: InvalidRequest, which names the field and the range."""
    if allowed.is_whole and not isinstance(value, int):
        raise InvalidRequest(field, f"must be a whole number, got {value!r}")
    if value not in allowed:
        raise InvalidRequest(field, f"must be {allowed}, got {shown(value)}")


def shown(value: object) -> str:
    """The value as an error names it. A -1 written into an unsigned field arrives as 4294967295: name both."""
    if isinstance(value, int) and 2**31 <= value < 2**32:
        return f"{value} ({value - 2**32} as an unsigned 32-bit number)"
    return repr(value)
