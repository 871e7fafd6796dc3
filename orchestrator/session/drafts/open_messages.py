"""The messages that a draft has not ended. There may be several: each overtakes the earlier ones.

Knows rounds and lengths of the text; must not know what the messages ask for.
"""

from __future__ import annotations


class OpenMessages:
    """The open messages of one draft. A message is identified by its round."""

    def __init__(self) -> None:
        self._known_to: dict[int, int] = {}
        """Text length in tokens, by the round of the message that reported it."""
        self._ending_round = 0
        """Round of the last message if it asks for growth that ends by itself, else 0."""
        self._first_round = 0
        """Round of the message since which the draft's node numbers are valid."""

    def __len__(self) -> int:
        return len(self._known_to)

    def __contains__(self, number: int) -> bool:
        return number in self._known_to

    @property
    def will_end(self) -> bool:
        """Whether the last requested growth ends by itself and is still running."""
        return self._ending_round in self._known_to

    def clear(self) -> None:
        """Forget all messages: a new lease begins without any."""
        self._known_to.clear()

    def add(self, number: int, num_tokens: int, *, ends: bool, tells_all: bool) -> None:
        """Record a message. `tells_all`: node numbers start from 0 in its replies and in all later ones."""
        self._known_to[number] = num_tokens
        self._ending_round = number if ends else 0
        if tells_all:
            self._first_round = number

    def end(self, number: int) -> None:
        del self._known_to[number]

    def num_told(self, number: int) -> int:
        """Return the text length in tokens that this message reported."""
        return self._known_to.get(number, 0)

    def has_numbers(self, number: int) -> bool:
        """Whether replies to this message use the valid node numbers."""
        return number >= self._first_round
