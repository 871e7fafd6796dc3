"""Guesses of a head in the target's engine, which come with each verdict (`workers.heads`).

Knows the last verdict's guesses; must not know how a head makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import NO_GUESSES, Guesses


class HeadGuesses:
    """A `DeliveredGuesser`: proposes what the last verdict carried."""

    def __init__(self) -> None:
        self._latest = NO_GUESSES
        self._num_tokens = 0

    def deliver(self, guesses: Guesses, num_tokens: int) -> None:
        self._latest, self._num_tokens = guesses, num_tokens

    def propose(self, text: Sequence[int]) -> Guesses:
        return self._latest if len(text) == self._num_tokens else NO_GUESSES
