"""Index of the last occurrence of each n-gram in a session's text. The draft looks up its own next tokens in it.

This is a vertical cascade: the lookup guesses for the draft, as the draft guesses for the target. The text may get
shorter between two calls, so each hit is compared with the current text.
Source: Chen et al. 2023 (Cascade Speculative Drafting, arXiv 2312.11462), with prompt lookup as the last drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

NGRAM_TOKENS = 3
"""N-gram length, in tokens."""


class TextIndex:
    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """Position of the token after the last occurrence of each n-gram."""
        self._num_indexed = 0

    def __repr__(self) -> str:
        return f"<TextIndex of {self._num_indexed} tokens>"

    def update(self, text: Sequence[int]) -> None:
        """Index the tokens added to the text."""
        first = max(min(self._num_indexed, len(text)) - NGRAM_TOKENS, 0)
        new = text[first:]
        runs = zip(*(islice(new, shift, None) for shift in range(NGRAM_TOKENS)), strict=False)
        self._ends.update((run, end) for end, run in enumerate(runs, first + NGRAM_TOKENS) if end < len(text))
        self._num_indexed = len(text)

    def lookup(self, text: Sequence[int], path: Sequence[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens that followed the last occurrence of the final n-gram of text and path.

        Empty without a match.
        """
        ending = (*text[-NGRAM_TOKENS:], *path)[-NGRAM_TOKENS:]
        end = self._ends.get(ending)
        if end is None or end >= len(text) or tuple(text[end - NGRAM_TOKENS : end]) != ending:
            return []
        whole = [*text[end:], *path]
        for place in range(num_tokens):  # a continuation that reaches the end of the text repeats itself
            whole.append(whole[place])
        return whole[:num_tokens]
