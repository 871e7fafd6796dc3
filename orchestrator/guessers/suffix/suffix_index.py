"""Suffix index: what followed the places of the text that end most like it, scored by how many of them agree.

Knows the committed tokens, and the recent outputs that it is given. Source: SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975), which keeps suffix trees; here they are suffix arrays of the texts read backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.speculation import NO_GUESSES, Guesses
from orchestrator.guessers.continuations import tree_of
from orchestrator.guessers.suffix.history import History
from orchestrator.guessers.suffix.suffix_array import MIN_MATCH, SuffixArray

MAX_INDEXED_TOKENS = 8192
"""Places that are remembered, the latest."""
MAX_LOOK_BACK_TOKENS = 4096
"""Of a long prompt only the end is looked through: all streams wait while it is, for about a microsecond a token."""
MAX_PLACES = 8
"""Those with the longest endings in common, that are asked how they went on; as many of the text as of the history."""


class SuffixIndex:
    """A tree of the continuations of the places that end as the text does."""

    def __init__(self, max_depth: int, history: History | None = None, prompt_len: int = 0) -> None:
        """`history`: where outputs of the same caller are looked up, and this one is kept."""
        self._max_depth = max_depth
        self._history = history
        self._prompt_len = prompt_len
        self._array = SuffixArray()
        self._first = self._end = MIN_MATCH
        """Of the text, the places that are indexed."""

    def propose(self, text: Sequence[int]) -> Guesses:
        self._index(text)
        found = list(self._found(text))
        if not found:
            return NO_GUESSES
        longest = max(match for match, _ in found)
        return tree_of(tokens for match, tokens in found if 2 * match > longest)

    def ended(self, text: Sequence[int]) -> None:
        """Keep the output for others of the caller's."""
        if self._history is not None:
            self._history.add(text, self._prompt_len)

    def _found(self, text: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Tokens that a place has in common with the ending of the text, and those that followed it."""
        for end, match in self._array.nearest(text, text, MAX_PLACES):
            yield match, text[end : end + self._max_depth]
        if self._history is not None:
            yield from self._history.continuations(text, MAX_PLACES, self._max_depth)

    def _index(self, text: Sequence[int]) -> None:
        """Take in what has been added; the ending of the whole text is followed by nothing yet."""
        size = len(text)
        if size - self._end > MAX_LOOK_BACK_TOKENS:
            self._array.clear()
            self._first = self._end = size - MAX_LOOK_BACK_TOKENS
        is_much = size - self._end > MAX_LOOK_BACK_TOKENS // 64
        add = self._array.add_many if is_much else self._array.add
        add(text, range(self._end, size))
        self._end = max(self._end, size)
        if self._end - self._first > MAX_INDEXED_TOKENS + MAX_INDEXED_TOKENS // 8:
            self._first = self._end - MAX_INDEXED_TOKENS
            self._array.forget(self._first)
