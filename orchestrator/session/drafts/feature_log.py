"""The target's features of the last committed tokens, as verdicts have brought them, for drafts that are heads.

Must not know drafts or messages.
"""

from __future__ import annotations

from collections import deque

from core.records import MAX_FEATURE_TOKENS, Features


class FeatureLog:
    """Features of consecutive tokens; older ones are dropped."""

    def __init__(self) -> None:
        self._pieces: deque[Features] = deque()

    @property
    def first(self) -> int:
        """Position of the first token."""
        return self._pieces[0].first if self._pieces else 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self._pieces[-1].end if self._pieces else 0

    def add(self, features: Features) -> None:
        """Add a verdict's features, which end later than the known ones. A new target may bring some of known tokens
        again, or leave a gap."""
        if features.first <= self.first or features.first > self.end:
            self._pieces.clear()
        self._pieces.append(features.since(self.end))
        while self._pieces[0].end < self.end - MAX_FEATURE_TOKENS:
            self._pieces.popleft()

    def since(self, position: int) -> Features | None:
        """The features from `position` on, as far as they are known; None without any."""
        if not self._pieces:
            return None
        rows = b"".join(piece.rows for piece in self._pieces if piece.end > position)
        first = next((piece.first for piece in self._pieces if piece.end > position), self.end)
        return Features(first, self._pieces[0].width, rows).since(position)
