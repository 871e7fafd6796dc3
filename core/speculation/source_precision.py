"""Learned precision of each source of guesses: P(the token is right | source).

Knows names of sources and chances; must not know tokens. It learns from every proposal, verified or not, so a source
that is not trusted now can recover. Match lengths added nothing to the sources' own chances (docs/guessers.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from core.speculation.calibration import MAX_CHANCE, PRIOR, WINDOW

PRIOR_POSITIONS = 4.0
"""Number of positions that the prior counts for."""
_KEPT = 1.0 - 1.0 / WINDOW


@dataclass(slots=True)
class Record:
    """Precision of one source, over the positions where it guessed; recent ones count most."""

    num_right: float = PRIOR * PRIOR_POSITIONS
    """Number of positions where one of its guesses was right, fading."""
    claimed: float = PRIOR_POSITIONS
    """Sum of the chances that it gave its guesses, fading."""
    num_seen: int = 0

    @property
    def factor(self) -> float:
        """Factor by which the source's chances are multiplied."""
        return self.num_right / self.claimed

    def observe(self, claimed: float, *, is_right: bool) -> None:
        self.num_right = _KEPT * self.num_right + is_right
        self.claimed = _KEPT * self.claimed + claimed
        self.num_seen += 1


class SourcePrecision:
    """Precision of all sources, shared by all sessions with the same verification."""

    def __init__(self) -> None:
        self._records = defaultdict[str, Record](Record)

    def __repr__(self) -> str:
        return f"<SourcePrecision {dict(self._records)}>"

    def of(self, source: str) -> Record:
        return self._records[source]

    def calibrated(self, source: str, chances: Iterable[float]) -> tuple[float, ...]:
        """The source's chances, corrected by its past precision."""
        factor = self.of(source).factor
        return tuple([min(chance * factor, MAX_CHANCE) for chance in chances])

    def observe(self, source: str, claimed: float, *, is_right: bool) -> None:
        """Record one position: the sum of the source's chances there, and whether one of its guesses was right."""
        self.of(source).observe(claimed, is_right=is_right)
