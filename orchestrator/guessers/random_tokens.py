"""A control: whatever token comes, one after the other. What it finds is found by chance.

Knows how long the text is. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from core import noise
from core.noise import Purpose
from core.speculation import Guesses

SEED = 0
"""Of all requests: guesses depend on the place alone, so an output is the same again."""


class RandomTokens:
    """A chain of tokens, each as likely as any other of the vocabulary."""

    def __init__(self, vocab_size: int, max_depth: int) -> None:
        self._vocab_size = vocab_size
        self._max_depth = max_depth

    def propose(self, text: Sequence[int]) -> Guesses:
        tokens = [self._token(len(text), row) for row in range(self._max_depth)]
        return Guesses.chain(tokens, (1.0 / self._vocab_size,) * len(tokens))

    def _token(self, first: int, row: int) -> int:
        return int(self._vocab_size * noise.uniform(SEED, first + row, row, Purpose.GUESS))
