"""The guesser port: who proposes what may come next, beside the draft engine.

A guesser is asked once a round. It knows the committed text, and answers nodes with chances. What these are worth is
learned from what was committed instead, whether or not they were verified (`core.speculation.SourceWorth`). A guesser
may also ask: for what the target says after nodes of its choice (`Asker`), which go with the block that is verified.
And it may say laws (`Drawer`): where verification asks what a guess was drawn from, its guesses are drawn from these.
The draft engine is the other kind: it tells pass by pass, when it likes (`core.speculation.NewNodes`), and its nodes
meet these in one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import isnan
from operator import ge
from typing import Protocol, runtime_checkable

from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree

DRAFT = "draft"
"""The name of the draft engine as a source of guesses."""
EXTRA_DRAFT = f"{DRAFT}_"
"""What the names of further drafts begin with."""
MAX_GUESSES = 256
"""Nodes of one answer; a guesser that answers more is not believed. No block is larger."""
MAX_LAW_TOKENS = 4096
"""Of one law, as of a draft's q at most."""


class BadGuesserInput(ValueError):
    """What a guesser got with its session's request cannot be used. That says nothing of the guesser in others."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Nodes, parents first."""

    parents: tuple[int, ...] = ()
    """`ROOT`, or which of these. What the tree has already is named as well, by its token and with a chance of 0, where
    a guess hangs below it."""
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """That the text goes on with the node, if it gets to its parent. Siblings share at most 1."""
    laws: tuple[SparseDistribution, ...] = ()
    """What each was drawn from; none where they were not drawn."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], chances: Sequence[float], laws: Sequence[SparseDistribution] = ()) -> Guesses:
        """`tokens` in a row below the root."""
        return cls(tuple(range(ROOT, len(tokens) - 1)), tuple(tokens), tuple(chances), tuple(laws))

    def check(self, vocab_size: int) -> None:
        """Raises: ValueError for what cannot be part of a draft tree, and whatever comes of columns that are none."""
        num = len(self.tokens)
        if num > MAX_GUESSES:
            raise ValueError(f"{num} nodes, more than {MAX_GUESSES}")
        if not len(self.parents) == len(self.chances) == num:
            raise ValueError("columns that differ in length")
        if not {*map(type, self.tokens), *map(type, self.parents)} <= {int}:
            raise ValueError("tokens or parents that are no integers")
        if num and not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            raise ValueError("a token outside the vocabulary")
        if min(self.parents, default=ROOT) < ROOT or any(map(ge, self.parents, count())):
            raise ValueError("a parent that does not come before its child")
        if num and (isnan(sum(self.chances)) or not 0.0 <= min(self.chances) <= max(self.chances) <= 1.0):
            raise ValueError("a chance outside [0, 1]")


NO_GUESSES = Guesses()


class Guesser(Protocol):
    """One session's source of guesses. Where the draft samples it is asked only when there is no draw."""

    def propose(self, text: Sequence[int]) -> Guesses:
        """What may follow `text`, all of which is committed. It has grown since the last time, and changed nowhere."""


@runtime_checkable
class Asker(Guesser, Protocol):
    """A guesser that learns from the target's answers. Its questions are rows of the target, and may be left out."""

    def questions(self, text: Sequence[int]) -> TokenTree:
        """Nodes below the end of `text`, for which it has just been asked to propose. A node that the text goes on with
        is accepted as any other."""

    def answered(self, samples: Sequence[int]) -> None:
        """What the target says after the root and after each node of the last questions."""


@runtime_checkable
class Keeper(Guesser, Protocol):
    """A guesser that keeps outputs for later ones."""

    def ended(self, text: Sequence[int]) -> None:
        """Nothing will be added to `text`, however its request ended: all of it is committed."""


@runtime_checkable
class Drawer(Guesser, Protocol):
    """A guesser that says laws. Where verification asks what a guess was drawn from, it is asked for these instead of
    proposals; who draws from them is the session (`orchestrator.guessers.drawing`), so no guesser sees noise."""

    def law(self, text: Sequence[int], drawn: Sequence[int]) -> SparseDistribution:
        """Of the token after `text` and then `drawn`, which is none of the text yet; `NO_Q` where nothing is known."""


def check_law(law: SparseDistribution, vocab_size: int) -> None:
    """Raises: ValueError for what nothing can be drawn from."""
    ids = law.token_ids
    if len(ids) > MAX_LAW_TOKENS:
        raise ValueError(f"a law of {len(ids)} tokens, more than {MAX_LAW_TOKENS}")
    if not ({*map(type, ids)} <= {int} and len({*ids}) == len(ids) and 0 <= min(ids) <= max(ids) < vocab_size):
        raise ValueError("a law over what are no tokens, or over one of them twice")
    if not (law.is_law and min(law.probs) > 0.0):
        raise ValueError("probabilities that are none")
