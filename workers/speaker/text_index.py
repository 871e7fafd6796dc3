"""Where each run of a few tokens in a session's text was last followed by something.

Knows the text alone. It may be shortened between two looks: what is found is compared with the text as it is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

MATCH = 3
"""Tokens that an ending and an earlier place have in common."""


class TextIndex:
    """Of one session; takes in what was added when it is told to."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """Of each run of `MATCH` tokens, the place of the token that followed it last."""
        self._num_indexed = 0

    def __repr__(self) -> str:
        return f"<TextIndex of {self._num_indexed} tokens>"

    def follow(self, text: Sequence[int]) -> None:
        """Take in what was added; the ending of the whole text is followed by nothing yet."""
        first = max(min(self._num_indexed, len(text)) - MATCH, 0)
        new = text[first:]
        runs = zip(*(islice(new, shift, None) for shift in range(MATCH)), strict=False)
        self._ends.update((run, end) for end, run in enumerate(runs, first + MATCH) if end < len(text))
        self._num_indexed = len(text)

    def after(self, text: Sequence[int], path: Sequence[int], num_tokens: int) -> list[int]:
        """What followed the last three tokens of text and path the last time; nothing where they are new together."""
        ending = (*text[-MATCH:], *path)[-MATCH:]
        end = self._ends.get(ending)
        if end is None or end >= len(text) or tuple(text[end - MATCH : end]) != ending:
            return []
        whole = [*text[end:], *path]
        for place in range(num_tokens):  # what repeats itself goes on doing so
            whole.append(whole[place])
        return whole[:num_tokens]
