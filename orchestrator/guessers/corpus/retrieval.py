"""Retrieval: what follows the longest ending of the text in a corpus that was indexed before.

Knows the committed tokens and the index. Source: REST (He et al. 2023, arXiv 2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import NO_GUESSES, Guesses
from orchestrator.guessers.continuations import tree_of
from orchestrator.guessers.corpus.index import CorpusIndex

MIN_MATCH, MAX_MATCH = 2, 16
"""Tokens of the text's ending that are looked up. REST: 2 to 16."""
MAX_TRIES = 2
"""Where the longest ending is found at the end of documents alone, a shorter one is looked up."""
MAX_PLACES = 8
"""Of the corpus, that are asked how they go on."""


class Retrieval:
    """A tree of the continuations in the corpus."""

    def __init__(self, index: CorpusIndex, max_depth: int) -> None:
        self._index = index
        self._max_depth = max_depth

    def propose(self, text: Sequence[int]) -> Guesses:
        length = MAX_MATCH
        for _ in range(MAX_TRIES):
            match, places = self._index.find(text[-length:], MIN_MATCH)
            if not match:
                break
            found = self._continuations(match, places)
            if len(found):
                return found
            length = match - 1
            if length < MIN_MATCH:
                break
        return NO_GUESSES

    def _continuations(self, match: int, places: range) -> Guesses:
        num = min(len(places), MAX_PLACES)
        # Suffixes are sorted, so those at equal distances are as frequent as they are in all of the range.
        chosen = [places[(2 * index + 1) * len(places) // (2 * num)] for index in range(num)]
        return tree_of(self._index.tokens_after(place, match, self._max_depth) for place in chosen)
