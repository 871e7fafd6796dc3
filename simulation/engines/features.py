"""Features without a model: the row of a token names the text up to it, so a head can tell whose features it was sent.

Knows tokens and features; must not know engines or messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.records import Features
from core.text import TokenLog

FEATURE_LAYERS = (0,)
FEATURE_WIDTH = 4
_FINITE = 0xBFFF_BFFF_BFFF_BFFF
"""Mask of four bfloat16 numbers that clears a bit of each exponent: such numbers are finite."""


def features_of(log: TokenLog, first: int, end: int) -> Features:
    """Features of the tokens of a text from `first` to before `end`."""
    names = [log.base(position + 1).prefix_hash & _FINITE for position in range(first, end)]
    return Features(first, FEATURE_WIDTH, b"".join([name.to_bytes(2 * FEATURE_WIDTH, "little") for name in names]))


def problem_of_features(features: Features, text: Sequence[int]) -> str | None:
    """Return why a head must not read these, which end within `text`, or None."""
    if features == features_of(TokenLog(text[: features.end]), features.first, features.end):
        return None
    return f"a head was sent features of another text for its tokens {features.first} to {features.end}"
