"""A suffix array of a text read backwards: the places of the text that end most like a given text.

Read backwards, a token that is added makes one more suffix and changes none: it is one insertion, and the places that
share the longest ending with a text stand beside it. Knows tokens and places; must not know whose they are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

MAX_MATCH = 16
"""Tokens of an ending by which places are told apart."""
MIN_MATCH = 2
"""A single token in common says little."""


class SuffixArray:
    """Places of one text, that only grows; a place is the number of tokens before it. Four bytes each, and some more
    for each different pair of tokens."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], array[int]] = {}
        """By the last tokens of what ends there, in the order of the tokens before them, read backwards."""

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def add(self, text: Sequence[int], places: Iterable[int]) -> None:
        """A few: each is looked for."""
        for end in places:
            last = tuple(text[end - MIN_MATCH : end])
            ends = self._ends.get(last)
            if ends is None:
                self._ends[last] = array("i", (end,))
            else:
                ends.insert(_rank(ends, text, _backwards(text, end)), end)

    def add_many(self, text: Sequence[int], places: Iterable[int]) -> None:
        """The same, sorted at once."""
        added: dict[tuple[int, ...], list[int]] = {}
        for end in places:
            added.setdefault(tuple(text[end - MIN_MATCH : end]), []).append(end)
        for last, new in added.items():
            merged = [*self._ends.get(last, ()), *new]
            if len(merged) > 1:
                merged.sort(key=lambda end: _backwards(text, end))
            self._ends[last] = array("i", merged)

    def forget(self, first: int) -> None:
        """The places before `first`."""
        kept = ((last, array("i", [end for end in ends if end >= first])) for last, ends in self._ends.items())
        self._ends = {last: ends for last, ends in kept if ends}

    def clear(self) -> None:
        self._ends.clear()

    def nearest(self, text: Sequence[int], ending: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
        """Places of `text` with the longest endings in common with `ending`, and how long these are; the longest
        first, `MAX_MATCH` at most."""
        ends = self._ends.get(tuple(ending[-MIN_MATCH:]))
        if ends is None:
            return
        sought = _backwards(ending, len(ending))
        after = _rank(ends, text, sought)
        before = after - 1
        match_before, match_after = _match_at(ends, before, text, sought), _match_at(ends, after, text, sought)
        for _ in range(most):
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
    """What stands before the last tokens of the ending at `end`, the nearest first."""
    return list(text[max(0, end - MAX_MATCH) : end - MIN_MATCH][::-1])


def _rank(ends: Sequence[int], text: Sequence[int], sought: list[int]) -> int:
    """How many of the places come before this ending."""
    return bisect_left(ends, sought, key=lambda other: _backwards(text, other))


def _match_at(ends: Sequence[int], index: int, text: Sequence[int], sought: list[int]) -> int:
    """Tokens that the ending at a place has in common with the one that is sought; 0 where there is no place."""
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
