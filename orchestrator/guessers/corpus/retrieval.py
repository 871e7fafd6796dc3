"""Retrieval: proposes what follows the text's longest ending that occurs in an indexed corpus.

Knows the committed tokens and the index. Source: REST (He et al. 2023, arXiv 2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import NO_GUESSES, Guesses
from orchestrator.guessers.continuations import tree_of
from orchestrator.guessers.corpus.index import CorpusIndex

MIN_MATCH, MAX_MATCH = 2, 16
"""Minimum and maximum length, in tokens, of the ending that is looked up. REST: 2 to 16."""
MAX_TRIES = 2
"""Maximum number of look-ups: a shorter ending is tried if the longest occurs only at the end of documents."""
MAX_OCCURRENCES = 8
"""Maximum number of occurrences whose continuations are used."""


class Retrieval:
    """A tree of continuations from the corpus."""

    def __init__(self, index: CorpusIndex, max_depth: int) -> None:
        self._index = index
        self._max_depth = max_depth

    def propose(self, text: Sequence[int]) -> Guesses:
        length = MAX_MATCH
        for _ in range(MAX_TRIES):
            match, indices = self._index.find(text[-length:], MIN_MATCH)
            if not match:
                break
            found = self._continuations(match, indices)
            if len(found):
                return found
            length = match - 1
            if length < MIN_MATCH:
                break
        return NO_GUESSES

    def _continuations(self, match: int, indices: range) -> Guesses:
        num = min(len(indices), MAX_OCCURRENCES)
        # Suffixes are sorted, so evenly spaced ones have the frequencies of the whole range.
        chosen = [indices[(2 * index + 1) * len(indices) // (2 * num)] for index in range(num)]
        return tree_of(self._index.tokens_after(index, match, self._max_depth) for index in chosen)
