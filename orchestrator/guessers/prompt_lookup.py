"""Guesses without a model: what followed the last time that the text ended as it does now.

Knows the committed tokens alone. A guess is a function of the prefix, so its q is a point mass and every verification
stays exact. Source: prompt lookup decoding (Saxena 2023), extended to the output as transformers and vLLM do.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import Average, Guesses

NGRAM_TOKENS = (4, 3, 2)
"""Lengths of the endings that are looked up, the surest first."""

MAX_LOOK_BACK_TOKENS = 2048
"""Of a long prompt only the end is looked through: all streams wait while it is."""


class LookupGuesser:
    """Prompt lookup as a guesser: a chain below the last committed token."""

    def __init__(self, worth: Average, max_depth: int) -> None:
        self._worth = worth
        self._max_depth = max_depth
        self._lookup = Lookup()
        self._proposed: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<LookupGuesser {self._lookup}>"

    def propose(self, text: Sequence[int]) -> Guesses:
        found = self._proposed = self._lookup.guess(text, self._max_depth)
        return Guesses.chain(found, (self._worth.value,) * len(found))

    def saw(self, tokens: Sequence[int]) -> None:
        for guess, token in zip(self._proposed, tokens, strict=False):
            self._worth.see(guess == token)
            if guess != token:
                break
        self._proposed = ()


class Lookup:
    """Where each short run of tokens was last followed by something. Grows with the text, in constant time a token."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def __repr__(self) -> str:
        return f"<Lookup of {self._num_indexed} tokens>"

    def guess(self, tokens: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Up to `num_tokens` tokens that followed the latest earlier place with the longest ending in common."""
        self._index(tokens)
        for length in NGRAM_TOKENS:
            start = self._after.get(tuple(tokens[-length:])) if len(tokens) > length else None
            if start is not None:
                return tuple(tokens[start : start + num_tokens])
        return ()

    def _index(self, tokens: Sequence[int]) -> None:
        """Take in what has been added; the ending of the whole text is followed by nothing yet."""
        for end in range(max(self._num_indexed, len(tokens) - MAX_LOOK_BACK_TOKENS, 1), len(tokens)):
            for length in NGRAM_TOKENS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))
