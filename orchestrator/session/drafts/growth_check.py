"""Validation of a draft's updates. Nothing from a draft is used unchecked.

Knows the new nodes; must not know leases or messages.
"""

from __future__ import annotations

from core.records import DraftUpdate

CORRUPT = (ValueError, TypeError, IndexError, OverflowError, AttributeError)
"""Exceptions raised by malformed growth. Growth that arrived pickled has not been checked earlier."""


def check_growth(update: DraftUpdate, vocab_size: int, num_committed: int, *, is_sampled: bool) -> None:
    """Validate an update.

    Raises: one of `CORRUPT`.
    """
    new_nodes = update.new_nodes
    if not new_nodes.is_checked:
        new_nodes.check()
    if not new_nodes.are_within(vocab_size):
        raise ValueError("a draft guessed a token outside the vocabulary")
    if is_sampled and len(new_nodes.q) < len(new_nodes):
        raise ValueError("a draft does not say what it drew from")
    if not 0 <= update.held <= num_committed:
        raise ValueError("a draft holds more than it was sent")
