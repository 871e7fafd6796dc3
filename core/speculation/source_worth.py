"""What guesses of each source have been worth: P(the token is right | source).

Knows names of sources and chances; must not know tokens. Learned of every proposal, verified or not, so a source that
is not believed at present can still prove itself. Lengths of matches were worth nothing beside a source's own chances
(docs/guessers.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from core.speculation.calibration import MAX_CHANCE, PRIOR, WINDOW

PRIOR_PLACES = 4.0
"""Places in the text that the prior counts for, before any was seen."""
_KEPT = 1.0 - 1.0 / WINDOW


@dataclass(slots=True)
class Record:
    """Of the places where a source had something to say; the last ones count most."""

    num_right: float = PRIOR * PRIOR_PLACES
    """Where one of its guesses was the token."""
    claimed: float = PRIOR_PLACES
    """What it had expected: the sum of the chances of its guesses."""
    num_seen: int = 0

    @property
    def factor(self) -> float:
        """By which its own chances are multiplied."""
        return self.num_right / self.claimed

    def observe(self, claimed: float, *, is_right: bool) -> None:
        self.num_right = _KEPT * self.num_right + is_right
        self.claimed = _KEPT * self.claimed + claimed
        self.num_seen += 1


class SourceWorth:
    """Of all sources, shared by all sessions that verify alike."""

    def __init__(self) -> None:
        self._records = defaultdict[str, Record](Record)

    def __repr__(self) -> str:
        return f"<SourceWorth {dict(self._records)}>"

    def of(self, source: str) -> Record:
        """What is known of a source."""
        return self._records[source]

    def calibrated(self, source: str, chances: Iterable[float]) -> tuple[float, ...]:
        """The source's own chances, corrected by what became of its earlier ones."""
        factor = self.of(source).factor
        return tuple([min(chance * factor, MAX_CHANCE) for chance in chances])

    def observe(self, source: str, claimed: float, *, is_right: bool) -> None:
        """At one place of the text: what the guesses there had claimed together, and whether one was the token."""
        self.of(source).observe(claimed, is_right=is_right)
