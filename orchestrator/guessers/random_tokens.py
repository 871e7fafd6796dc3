"""Control: uniformly random tokens, accepted only by chance.

Knows the length of the text. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from core import noise
from core.noise import Purpose
from core.speculation import Guesses

SEED = 0
"""Seed of all requests. Guesses depend on the position alone, so outputs are reproducible."""


class RandomTokens:
    """A chain of tokens drawn uniformly from the vocabulary."""

    def __init__(self, vocab_size: int, max_depth: int) -> None:
        self._vocab_size = vocab_size
        self._max_depth = max_depth

    def propose(self, text: Sequence[int]) -> Guesses:
        tokens = [self._token(len(text), row) for row in range(self._max_depth)]
        return Guesses.chain(tokens, (1.0 / self._vocab_size,) * len(tokens))

    def _token(self, first: int, row: int) -> int:
        return int(self._vocab_size * noise.uniform(SEED, first + row, row, Purpose.GUESS))
