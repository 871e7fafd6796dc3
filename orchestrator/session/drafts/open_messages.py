"""The messages that a draft has not ended. There may be several: a newer one overtakes the earlier ones.

Knows rounds and lengths of the text; must not know what the messages ask for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Message:
    num_tokens: int
    """Length of the text, in tokens, that the draft has with this message."""
    is_bounded: bool
    """Whether the growth that it asks for ends by itself."""


class OpenMessages:
    """The open messages of one draft. A message is identified by its round."""

    def __init__(self) -> None:
        self._by_round: dict[int, _Message] = {}
        self._last_round = 0
        self._first_round = 0
        """Round of the message since which the draft's node numbers are valid."""

    def __len__(self) -> int:
        return len(self._by_round)

    def __contains__(self, number: int) -> bool:
        return number in self._by_round

    @property
    def will_end(self) -> bool:
        """Whether the last requested growth ends by itself and is still running."""
        return self._last_round in self._by_round and self.is_bounded(self._last_round)

    def clear(self) -> None:
        """Forget all messages: a new lease begins without any."""
        self._by_round.clear()

    def add(self, number: int, num_tokens: int, *, ends: bool, reports_all: bool) -> None:
        """Record a message. `reports_all`: node numbers start from 0 in its replies and in all later ones."""
        self._by_round[number] = _Message(num_tokens, ends)
        self._last_round = number
        if reports_all:
            self._first_round = number

    def end(self, number: int) -> None:
        del self._by_round[number]

    def is_bounded(self, number: int) -> bool:
        """Whether the growth that this message asks for ends by itself."""
        return self._by_round[number].is_bounded

    def num_sent_tokens(self, number: int) -> int:
        """Length of the text, in tokens, that the draft has with this message."""
        return self._by_round[number].num_tokens

    def has_numbers(self, number: int) -> bool:
        """Whether replies to this message use the valid node numbers."""
        return number >= self._first_round
