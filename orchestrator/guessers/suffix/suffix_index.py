"""Suffix index: proposes what followed the text's best-matching earlier positions, scored by their agreement.

Knows the committed tokens, and recent outputs. Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), which
keeps suffix trees; here they are suffix arrays of reversed texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.speculation import NO_GUESSES, Guesses
from orchestrator.guessers.continuations import tree_of
from orchestrator.guessers.suffix.history import History
from orchestrator.guessers.suffix.suffix_array import MIN_MATCH, SuffixArray

MAX_INDEXED_TOKENS = 8192
"""Number of indexed positions, the latest ones. The index is cut to it when it is an eighth larger."""
MAX_LOOK_BACK_TOKENS = 4096
"""Maximum number of tokens indexed of a long prompt, counted from its end. Indexing blocks all streams for about a
microsecond per token."""
MAX_OCCURRENCES = 8
"""Maximum number of positions whose continuations are used, for the text and for the history each."""


class SuffixIndex:
    """A tree of the continuations after positions that match the text's ending."""

    def __init__(self, max_depth: int, history: History | None = None, prompt_len: int = 0) -> None:
        """`history`: outputs of the same caller to search, and where to keep this output."""
        self._max_depth = max_depth
        self._history = history
        self._prompt_len = prompt_len
        self._array = SuffixArray()
        self._first = self._end = MIN_MATCH
        """Start and end of the indexed positions."""

    def propose(self, text: Sequence[int]) -> Guesses:
        self._index(text)
        found = list(self._found(text))
        if not found:
            return NO_GUESSES
        longest = max(match for match, _ in found)
        return tree_of(tokens for match, tokens in found if 2 * match > longest)

    def ended(self, text: Sequence[int]) -> None:
        """Add the output to the caller's history."""
        if self._history is not None:
            self._history.add(text, self._prompt_len)

    def _found(self, text: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the length of each match, and the tokens that followed it."""
        for end, match in self._array.nearest(text, text, MAX_OCCURRENCES):
            yield match, text[end : end + self._max_depth]
        if self._history is not None:
            yield from self._history.continuations(text, MAX_OCCURRENCES, self._max_depth)

    def _index(self, text: Sequence[int]) -> None:
        """Index the new tokens. The ending of the whole text has no continuation yet."""
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
