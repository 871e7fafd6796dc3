"""n-gram tables: the most frequent token after the last three tokens, else after the last two, else after the last.

Counts the last 512 committed tokens; older tokens are removed from the tables, so memory is bounded and old statistics
are forgotten. Each guess is treated as text when the next one is looked up. Source: n-gram tables as draft
of greedy decoding (the predictor of akunu); trivial n-gram models as drafts: Leviathan et al. 2023 (arXiv 2211.17192),
section 3.6.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import NO_Q, Guesses, SparseDistribution

CONTEXTS = (3, 2, 1)
"""Context lengths in tokens, the longest first: orders 4 to 2."""
WINDOW_TOKENS = 512

Counts = dict[int, int]
"""Count of each token. Among equally frequent tokens the latest is last."""


class NgramTables:
    """A chain of the most frequent continuations; or a distribution, from the counts of the longest known context."""

    def __init__(self, max_depth: int, max_distribution_tokens: int = WINDOW_TOKENS) -> None:
        self._max_depth = max_depth
        self._max_distribution_tokens = max_distribution_tokens
        self._tables: dict[tuple[int, ...], Counts] = {}
        """Counts by context. A context's length determines its order."""
        self._first = self._end = 0
        """Start and end of the counted part of the text."""

    def propose(self, text: Sequence[int]) -> Guesses:
        self._count(text)
        context = list(text[-CONTEXTS[0] :])
        tokens, chances = list[int](), list[float]()
        while len(tokens) < self._max_depth and (found := self._most_frequent(context)) is not None:
            token, chance = found
            tokens.append(token)
            chances.append(chance)
            context = [*context[-CONTEXTS[0] + 1 :], token]
        return Guesses.chain(tokens, chances)

    def distribution(self, text: Sequence[int], drawn: Sequence[int]) -> SparseDistribution:
        self._count(text)
        counts = self._counts_after((*text[-CONTEXTS[0] :], *drawn)[-CONTEXTS[0] :])
        return SparseDistribution.of_counts(counts, self._max_distribution_tokens) if counts else NO_Q

    def _most_frequent(self, context: Sequence[int]) -> tuple[int, float] | None:
        """Return the most frequent token after the longest known context, and its share."""
        counts = self._counts_after(context)
        if not counts:
            return None
        token = max(reversed(counts), key=counts.__getitem__)
        return token, counts[token] / sum(counts.values())

    def _counts_after(self, context: Sequence[int]) -> Counts | None:
        """Return the counts after the longest known context."""
        for length in CONTEXTS:
            counts = self._tables.get(tuple(context[-length:])) if length <= len(context) else None
            if counts:
                return counts
        return None

    def _count(self, text: Sequence[int]) -> None:
        """Count the new tokens, and drop those that have left the window."""
        first = max(0, len(text) - WINDOW_TOKENS)
        if first >= self._end:
            self._tables.clear()
            self._first = self._end = first
        for position in range(self._end, len(text)):
            for context in _contexts(text, self._first, position):
                counts = self._tables.setdefault(context, {})
                counts[text[position]] = counts.pop(text[position], 0) + 1
        self._end = len(text)
        while self._first < first:
            self._forget_first(text)

    def _forget_first(self, text: Sequence[int]) -> None:
        """Drop the n-grams that begin with the oldest token."""
        context = tuple(text[self._first : self._first + CONTEXTS[0]])
        self._first += 1
        for length in range(1, len(context) + 1):
            if self._first - 1 + length >= self._end:
                return
            head, token = context[:length], text[self._first - 1 + length]
            counts = self._tables[head]
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
                if not counts:
                    del self._tables[head]


def _contexts(text: Sequence[int], first: int, position: int) -> list[tuple[int, ...]]:
    """Return the contexts before a position that begin in the window."""
    return [tuple(text[position - length : position]) for length in CONTEXTS if position - length >= first]
