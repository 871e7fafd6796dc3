"""Suffix index: what followed the places of the text that end most like it, scored by how many of them agree.

Knows the committed tokens alone. Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), which keeps a suffix
tree; here it is a suffix array of the text read backwards. Read so, a token that is added makes one more suffix and
changes none, so that it is one insertion, and the places that share the longest ending with the text stand beside it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from core.speculation import NO_GUESSES, Guesses
from orchestrator.guessers.continuations import tree_of

MAX_INDEXED_TOKENS = 8192
"""Places that are remembered, the latest; four bytes each, and some more for each different token."""
MAX_LOOK_BACK_TOKENS = 4096
"""Of a long prompt only the end is looked through: all streams wait while it is, for about a microsecond a token."""
MAX_MATCH = 16
"""Tokens of an ending by which places are told apart."""
MIN_MATCH = 2
"""A single token in common says little."""
MAX_PLACES = 8
"""Those with the longest endings in common, that are asked how they went on."""


class SuffixIndex:
    """A tree of the continuations of the places that end as the text does."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._ends: dict[tuple[int, ...], array[int]] = {}
        """By the last tokens of what ends there, in the order of the tokens before them, read backwards."""
        self._first = self._end = MIN_MATCH
        """Of the text, the places that are indexed."""

    def __repr__(self) -> str:
        return f"<SuffixIndex of {self._end - self._first} places>"

    def propose(self, text: Sequence[int]) -> Guesses:
        self._index(text)
        places = list(self._nearest(text))
        if not places:
            return NO_GUESSES
        longest = max(match for _, match in places)
        return tree_of(text[end : end + self._max_depth] for end, match in places if 2 * match > longest)

    # The index

    def _index(self, text: Sequence[int]) -> None:
        """Take in what has been added; the ending of the whole text is followed by nothing yet."""
        size = len(text)
        if size - self._end > MAX_LOOK_BACK_TOKENS:
            self._ends.clear()
            self._first = self._end = size - MAX_LOOK_BACK_TOKENS
        if size - self._end > MAX_LOOK_BACK_TOKENS // 64:
            self._add_many(text)
        else:
            for end in range(self._end, size):
                last = tuple(text[end - MIN_MATCH : end])
                ends = self._ends.get(last)
                if ends is None:
                    self._ends[last] = array("i", (end,))
                else:
                    ends.insert(_rank(ends, text, end), end)
        self._end = max(self._end, size)
        if self._end - self._first > MAX_INDEXED_TOKENS + MAX_INDEXED_TOKENS // 8:
            self._forget(self._end - MAX_INDEXED_TOKENS)

    def _add_many(self, text: Sequence[int]) -> None:
        added: dict[tuple[int, ...], list[int]] = {}
        for end in range(self._end, len(text)):
            added.setdefault(tuple(text[end - MIN_MATCH : end]), []).append(end)
        for last, new in added.items():
            merged = [*self._ends.get(last, ()), *new]
            if len(merged) > 1:
                merged.sort(key=lambda end: _backwards(text, end))
            self._ends[last] = array("i", merged)

    def _forget(self, first: int) -> None:
        """The places before `first`."""
        kept = ((last, array("i", [end for end in ends if end >= first])) for last, ends in self._ends.items())
        self._ends = {last: ends for last, ends in kept if ends}
        self._first = first

    # Guessing

    def _nearest(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Places with the longest endings in common with the text, and how long these are; the longest first."""
        ends = self._ends.get(tuple(text[-MIN_MATCH:]))
        if ends is None:
            return
        after = _rank(ends, text, len(text))
        before = after - 1
        match_before, match_after = _match_at(ends, before, text), _match_at(ends, after, text)
        for _ in range(MAX_PLACES):
            if not (match_before or match_after):
                return
            if match_before > match_after:
                yield ends[before], match_before
                before -= 1
                match_before = _match_at(ends, before, text)
            else:
                yield ends[after], match_after
                after += 1
                match_after = _match_at(ends, after, text)


def _backwards(text: Sequence[int], end: int) -> list[int]:
    """What stands before the last tokens of the ending at `end`, the nearest first."""
    return list(text[max(0, end - MAX_MATCH) : end - MIN_MATCH][::-1])


def _rank(ends: Sequence[int], text: Sequence[int], end: int) -> int:
    """How many of the places come before this one."""
    return bisect_left(ends, _backwards(text, end), key=lambda other: _backwards(text, other))


def _match_at(ends: Sequence[int], index: int, text: Sequence[int]) -> int:
    """Tokens that the ending at a place has in common with the text's, `MAX_MATCH` at most; 0 where there is none."""
    if not 0 <= index < len(ends):
        return 0
    end, size = ends[index], len(text)
    if text[max(0, end - MAX_MATCH) : end] == text[-MAX_MATCH:]:
        return min(end, MAX_MATCH)
    match = MIN_MATCH
    while match < end and text[end - 1 - match] == text[size - 1 - match]:
        match += 1
    return match
