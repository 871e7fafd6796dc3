"""The messages that a draft has not ended: several, since each overtakes the ones before, and the draft says so.

Knows rounds and lengths of the text; must not know what the messages ask for.
"""

from __future__ import annotations


class OpenMessages:
    """Of one draft. A message is named by its round."""

    def __init__(self) -> None:
        self._known_to: dict[int, int] = {}
        """How many tokens each told of."""
        self._ending_round = 0
        """Of the last message, if it asks for growth that ends by itself."""
        self._first_round = 0
        """Of the message since which the draft's numbers hold."""

    def __len__(self) -> int:
        return len(self._known_to)

    def __contains__(self, number: int) -> bool:
        return number in self._known_to

    @property
    def will_end(self) -> bool:
        """Whether the growth that was asked for last ends by itself, and has not."""
        return self._ending_round in self._known_to

    def clear(self) -> None:
        """There is another lease, on which nothing was said."""
        self._known_to.clear()

    def add(self, number: int, num_tokens: int, *, ends: bool, tells_all: bool) -> None:
        """One more; `tells_all`: nodes have numbers from 0 again in what answers it and in all that follows."""
        self._known_to[number] = num_tokens
        self._ending_round = number if ends else 0
        if tells_all:
            self._first_round = number

    def end(self, number: int) -> None:
        """The draft has ended it."""
        del self._known_to[number]

    def num_told(self, number: int) -> int:
        """How many tokens the draft knew of when it answered this."""
        return self._known_to.get(number, 0)

    def has_numbers(self, number: int) -> bool:
        """Whether what answers this message has the numbers that hold."""
        return number >= self._first_round
