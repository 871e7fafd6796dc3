"""Hidden states that go with a verdict to a head on a draft engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EXPONENT = 0x7F80
"""Bits of a bfloat16's exponent; all are set in NaN and in infinite numbers."""
MAX_FEATURE_TOKENS = 256
"""Number of tokens before the last verdict whose features a head gets; it attends to no others. Of an 8B model they are
6 MB, which a session keeps for the case that its draft is lost."""


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of consecutive tokens of the text, from a pass of the target. A head on a draft engine reads them.

    Rounded to bfloat16, because a head only guesses: no output depends on them.
    """

    first: int
    """Position of the first token."""
    width: int
    """Numbers per token: the hidden states of `ModelInfo.feature_layers`, side by side."""
    rows: bytes
    """bfloat16, little-endian.  # [tokens, width]"""

    @property
    def num_tokens(self) -> int:
        return len(self.rows) // (2 * self.width) if self.width else 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + self.num_tokens

    def since(self, position: int) -> Features:
        """The features of the tokens from `position` on; all if it is before the first."""
        first = max(position, self.first)
        return Features(first, self.width, self.rows[2 * self.width * (first - self.first) :])

    def problem(self, width: int, end: int) -> str | None:
        """Return why these are not features of this width that end before position `end`, or None."""
        if self.width != width:
            return f"{self.width} numbers of features a token, not {width}"
        if not self.num_tokens or len(self.rows) != 2 * width * self.num_tokens:
            return f"{len(self.rows)} bytes of features are no rows of {width} numbers"
        if self.first < 0 or self.end != end:
            return f"its features are of the tokens {self.first} to {self.end}, and should end before {end}"
        return None

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return bool((np.frombuffer(self.rows, np.uint16) & EXPONENT).max(initial=0) < EXPONENT)
