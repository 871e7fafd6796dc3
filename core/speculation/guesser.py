"""The guesser port: who proposes what may come next, beside the draft engine.

A guesser is asked once a round. It knows the committed text, and answers nodes with chances.
What these are worth it learns from what was committed instead, whether or not they were verified. The draft engine is
the other kind: it tells pass by pass, when it likes (`core.speculation.NewNodes`), and its nodes meet these in
one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.speculation.token_tree import ROOT


@dataclass(frozen=True, slots=True)
class Guesses:
    """Nodes, parents first."""

    parents: tuple[int, ...] = ()
    """`ROOT`, or which of these. What the tree has already is named as well, by its token and with a chance of 0, where
    a guess hangs below it."""
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """That the text goes on with the node, if it gets to its parent."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], chances: Sequence[float]) -> Guesses:
        """`tokens` in a row below the root."""
        return cls(tuple(range(ROOT, len(tokens) - 1)), tuple(tokens), tuple(chances))


class Guesser(Protocol):
    """One session's source of guesses. Where the draft samples it is asked only when there is no draw."""

    def propose(self, text: Sequence[int]) -> Guesses:
        """What may follow `text`, all of which is committed."""
        ...

    def saw(self, tokens: Sequence[int]) -> None:
        """These were committed behind the text of the last proposal."""
        ...
