"""What guesses of each source have been worth: P(the token is right | source, length of its match).

Knows names of sources, lengths and chances; must not know tokens. Learned of every proposal, verified or not, so a
source that is not believed at present can still prove itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.speculation.calibration import MAX_CHANCE, PRIOR, WINDOW

PRIOR_PLACES = 4.0
"""Places in the text that the prior counts for, before any was seen."""
LAST_BUCKET = 6
_KEPT = 1.0 - 1.0 / WINDOW


def bucket_of(match: int) -> int:
    """Matches of 0 to 3 tokens each by themselves, then 4 to 7, 8 to 15, and the longer ones together."""
    return match if match < 4 else min(match.bit_length() + 1, LAST_BUCKET)


@dataclass(slots=True)
class Record:
    """Of the places where a source had something to say, with matches of about one length; the last ones count most."""

    num_right: float = PRIOR * PRIOR_PLACES
    """Where one of its guesses was the token."""
    claimed: float = PRIOR_PLACES
    """What it had expected: the sum of the chances of its guesses."""
    num_seen: int = 0

    @property
    def factor(self) -> float:
        """By which its own chances are multiplied."""
        return self.num_right / self.claimed

    def see(self, claimed: float, *, is_right: bool) -> None:
        self.num_right = _KEPT * self.num_right + is_right
        self.claimed = _KEPT * self.claimed + claimed
        self.num_seen += 1


class SourceWorth:
    """Of all sources, shared by all sessions that verify alike."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[Record, ...]] = {}

    def __repr__(self) -> str:
        return f"<SourceWorth {self._records}>"

    def of(self, source: str) -> tuple[Record, ...]:
        """What is known of a source, by bucket."""
        records = self._records.get(source)
        if records is None:
            records = self._records[source] = tuple(Record() for _ in range(LAST_BUCKET + 1))
        return records

    def calibrated(self, source: str, chances: Iterable[float], matches: Iterable[int]) -> tuple[float, ...]:
        """The source's own chances, corrected by what became of its earlier ones."""
        factors = [record.factor for record in self.of(source)]
        scaled = [chance * factors[bucket_of(match)] for chance, match in zip(chances, matches, strict=True)]
        return tuple([chance if chance < MAX_CHANCE else MAX_CHANCE for chance in scaled])

    def see(self, source: str, match: int, claimed: float, *, is_right: bool) -> None:
        """At one place of the text: what the guesses there had claimed together, and whether one was the token."""
        self.of(source)[bucket_of(match)].see(claimed, is_right=is_right)
