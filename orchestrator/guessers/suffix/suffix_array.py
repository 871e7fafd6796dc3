"""Suffix array of a reversed text: finds the positions whose preceding tokens match a text's ending best.

A token added to the text adds one suffix to the reversed text and changes none, so an update is one insertion. The
positions that share the longest ending with a text are adjacent in the array. Knows tokens and positions; must not know
whose they are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

MAX_MATCH = 16
"""Number of tokens by which endings are compared."""
MIN_MATCH = 2
"""Minimum match in tokens: a single common token says little."""


class SuffixArray:
    """Positions in one growing text. A position is the number of tokens before it.

    Memory: four bytes a position, and some more for each different pair of tokens.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], array[int]] = {}
        """Positions by the `MIN_MATCH` tokens before them, sorted by the earlier tokens, read backwards."""

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def add(self, text: Sequence[int], positions: Iterable[int]) -> None:
        """Add a few positions, each by binary search."""
        for end in positions:
            last = tuple(text[end - MIN_MATCH : end])
            ends = self._ends.get(last)
            if ends is None:
                self._ends[last] = array("i", (end,))
            else:
                ends.insert(_rank(ends, text, _backwards(text, end)), end)

    def add_many(self, text: Sequence[int], positions: Iterable[int]) -> None:
        """Add many positions, sorted at once."""
        added: dict[tuple[int, ...], list[int]] = {}
        for end in positions:
            added.setdefault(tuple(text[end - MIN_MATCH : end]), []).append(end)
        for last, new in added.items():
            merged = [*self._ends.get(last, ()), *new]
            if len(merged) > 1:
                merged.sort(key=lambda end: _backwards(text, end))
            self._ends[last] = array("i", merged)

    def forget(self, first: int) -> None:
        """Drop the positions before `first`."""
        kept = ((last, array("i", [end for end in ends if end >= first])) for last, ends in self._ends.items())
        self._ends = {last: ends for last, ends in kept if ends}

    def clear(self) -> None:
        self._ends.clear()

    def nearest(self, text: Sequence[int], ending: Sequence[int], max_matches: int) -> Iterator[tuple[int, int]]:
        """Yield the positions of `text` that share the longest endings with `ending`, and the lengths of these endings.

        The longest come first. A length is at most `MAX_MATCH`.
        """
        ends = self._ends.get(tuple(ending[-MIN_MATCH:]))
        if ends is None:
            return
        sought = _backwards(ending, len(ending))
        after = _rank(ends, text, sought)
        before = after - 1
        match_before, match_after = _match_at(ends, before, text, sought), _match_at(ends, after, text, sought)
        for _ in range(max_matches):
            if not (match_before or match_after):
                return
            if match_before > match_after:
                yield ends[before], match_before
                before -= 1
                match_before = _match_at(ends, before, text, sought)
            else:
                yield ends[after], match_after
                after += 1
                match_after = _match_at(ends, after, text, sought)


def _backwards(text: Sequence[int], end: int) -> list[int]:
    """Return the tokens before the last `MIN_MATCH` at `end`, the nearest first."""
    return list(text[max(0, end - MAX_MATCH) : end - MIN_MATCH][::-1])


def _rank(ends: Sequence[int], text: Sequence[int], sought: list[int]) -> int:
    """Return the number of positions that sort before this ending."""
    return bisect_left(ends, sought, key=lambda other: _backwards(text, other))


def _match_at(ends: Sequence[int], index: int, text: Sequence[int], sought: list[int]) -> int:
    """Return the number of common tokens of a position's ending and the sought one; 0 if there is no such position."""
    if not 0 <= index < len(ends):
        return 0
    found = _backwards(text, ends[index])
    if found == sought:
        return MIN_MATCH + len(found)
    match = 0
    for mine, theirs in zip(found, sought, strict=False):
        if mine != theirs:
            break
        match += 1
    return MIN_MATCH + match
