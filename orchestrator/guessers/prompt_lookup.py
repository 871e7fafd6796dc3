"""Prompt lookup: proposes what followed earlier occurrences of the text's ending.

Knows the committed tokens alone. A guess is a function of the prefix, so its q is a point mass and every verification
stays exact. Source: prompt lookup decoding (Saxena 2023), extended to the output as in transformers and vLLM, and to
several different continuations.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import NO_GUESSES, ROOT, Guesses

MAX_LOOK_BACK_TOKENS = 4096
"""Maximum number of tokens indexed of a long prompt, counted from its end. Indexing blocks all streams for half a
microsecond per token."""
MAX_INDEXED_TOKENS = 8192
"""Maximum number of indexed tokens. Beyond it, the index is rebuilt from the last `MAX_LOOK_BACK_TOKENS`."""
MAX_OCCURRENCES = 16
"""Maximum number of positions kept for each ending, the latest ones."""


class PromptLookup:
    """Continuations of the longest ending that occurred earlier in the text, as chains below the root."""

    def __init__(
        self,
        max_depth: int,
        *,
        min_match: int,
        max_match: int,
        by_frequency: bool = False,
        num_branches: int = 1,
    ) -> None:
        """`min_match`, `max_match`: length of the ending in tokens, from `speculation.lookup_min_match` and
        `lookup_max_match`. `by_frequency`: prefer the most frequent continuation to the latest."""
        self._max_depth = max_depth
        self._lengths = range(max_match, min_match - 1, -1)
        """Lengths of endings to look up, the longest first."""
        self._by_frequency = by_frequency
        self._num_branches = num_branches
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """For each run of tokens, the positions after its occurrences."""
        self._first = self._num_indexed = 0

    def propose(self, text: Sequence[int]) -> Guesses:
        self._index(text)
        for length in self._lengths:
            ends = self._ends.get(tuple(text[-length:])) if len(text) > length else None
            if ends is not None:
                return self._continuations(text, ends)
        return NO_GUESSES

    def _index(self, text: Sequence[int]) -> None:
        """Index the new tokens. The ending of the whole text has no continuation yet."""
        is_long = len(text) - self._num_indexed > MAX_LOOK_BACK_TOKENS
        if is_long or len(text) - self._first > MAX_INDEXED_TOKENS:
            self._ends.clear()
            self._num_indexed = self._first = len(text) - MAX_LOOK_BACK_TOKENS
        for length in self._lengths:
            self._index_runs(text, length)
        self._num_indexed = len(text)

    def _index_runs(self, text: Sequence[int], length: int) -> None:
        first, last, all_ends = max(self._num_indexed, length), len(text), self._ends
        columns = [text[first - length + shift : last - length + shift] for shift in range(length)]
        for end, run in enumerate(zip(*columns, strict=True) if first < last else (), first):
            ends = all_ends.get(run)
            if ends is None:
                all_ends[run] = [end]
                continue
            ends.append(end)
            if len(ends) > MAX_OCCURRENCES:
                del ends[0]

    def _continuations(self, text: Sequence[int], ends: Sequence[int]) -> Guesses:
        """Return continuations with different first tokens, each from its latest position."""
        counts: dict[int, int] = {}
        latest: dict[int, int] = {}
        for end in ends:
            token = text[end]
            counts[token] = counts.get(token, 0) + 1
            latest[token] = end
        best = sorted(latest, key=lambda token: (counts[token] * self._by_frequency, latest[token]), reverse=True)
        parents, tokens, chances = list[int](), list[int](), list[float]()
        for token in best[: self._num_branches]:
            chain = text[latest[token] : latest[token] + self._max_depth]
            first, size = len(tokens), len(chain)
            parents += [ROOT, *range(first, first + size - 1)]
            tokens += chain
            chances += [counts[token] / len(ends), *[1.0] * (size - 1)]
        return Guesses(tuple(parents), tuple(tokens), tuple(chances))
