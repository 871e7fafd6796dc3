"""The guesser port: sources of guesses beside the draft engine.

A guesser is asked once a round. It knows the committed text and returns nodes with chances. These chances are corrected
by what was committed, whether or not the guesses were verified (`SourcePrecision`). A guesser may also ask for the
target's tokens after nodes of its choice (`QuestioningGuesser`); these nodes go into the block that is verified. It may
return distributions (`SamplingGuesser`), from which its guesses are drawn if the rule needs q.
The draft engine works differently: it sends nodes pass by pass, at any time (`core.speculation.NewNodes`). Its nodes
and the guessers' are merged in one tree.
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
"""Name of the draft engine as a source of guesses."""
EXTRA_DRAFT = f"{DRAFT}_"
"""Prefix of the names of further drafts."""
MAX_GUESSES = 256
"""Largest number of nodes in one answer; larger answers are rejected. No block is larger."""
MAX_DISTRIBUTION_TOKENS = 4096
"""Largest number of tokens of one distribution, the same as for a draft's q."""


class BadGuesserInput(ValueError):
    """The request's input to a guesser is unusable. The guesser still works for other sessions."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Proposed nodes, parents first."""

    parents: tuple[int, ...] = ()
    """`ROOT`, or the index of an earlier node. A node that the tree already has is listed too, with chance 0, if a
    guess hangs below it."""
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """Chance that the text continues with the node, given its parent. Siblings sum to at most 1."""
    distributions: tuple[SparseDistribution, ...] = ()
    """The distribution each node was drawn from; empty if they were not drawn."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(
        cls, tokens: Sequence[int], chances: Sequence[float], distributions: Sequence[SparseDistribution] = ()
    ) -> Guesses:
        """A chain of `tokens` below the root."""
        return cls(tuple(range(ROOT, len(tokens) - 1)), tuple(tokens), tuple(chances), tuple(distributions))

    def check(self, vocab_size: int) -> None:
        """Raises: ValueError if the nodes cannot be part of a draft tree; other errors if a column is not a
        sequence."""
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
    """One session's source of guesses. If the draft samples, a guesser is asked only when the draft has no draw."""

    def propose(self, text: Sequence[int]) -> Guesses:
        """Propose continuations of `text`, all of which is committed. Between calls it only grows."""


@runtime_checkable
class QuestioningGuesser(Guesser, Protocol):
    """A guesser that learns from the target's answers. Its questions are rows of the target and may be dropped."""

    def questions(self, text: Sequence[int]) -> TokenTree:
        """Nodes below the end of `text`, the text of the last `propose`. A question that equals the text's next token
        is accepted like any guess."""

    def answered(self, samples: Sequence[int]) -> None:
        """Receive the target's tokens after the root and after each node of the last questions."""


@runtime_checkable
class DeliveredGuesser(Guesser, Protocol):
    """A guesser whose guesses are made elsewhere and come with verdicts."""

    def deliver(self, guesses: Guesses, num_tokens: int) -> None:
        """Receive the guesses below a text of `num_tokens` tokens, before `propose` is called for it."""


@runtime_checkable
class HistoryGuesser(Guesser, Protocol):
    """A guesser that keeps outputs for later requests."""

    def ended(self, text: Sequence[int]) -> None:
        """Receive the final text, all of it committed, however the request ended."""


@runtime_checkable
class SamplingGuesser(Guesser, Protocol):
    """A guesser that returns distributions. If the rule needs q, it is asked for these in place of proposals. The
    session draws from them (`orchestrator.guessers.drawing`), so no guesser sees the noise."""

    def distribution(self, text: Sequence[int], drawn: Sequence[int]) -> SparseDistribution:
        """Distribution of the token after `text` and then `drawn`, which is not committed; `NO_Q` if unknown."""


def check_distribution(distribution: SparseDistribution, vocab_size: int) -> None:
    """Raises: ValueError if `distribution` is not a valid distribution over the vocabulary."""
    ids = distribution.token_ids
    if len(ids) > MAX_DISTRIBUTION_TOKENS:
        raise ValueError(f"a law of {len(ids)} tokens, more than {MAX_DISTRIBUTION_TOKENS}")
    if not ({*map(type, ids)} <= {int} and len({*ids}) == len(ids) and 0 <= min(ids) <= max(ids) < vocab_size):
        raise ValueError("a law over what are no tokens, or over one of them twice")
    if not (distribution.is_valid and min(distribution.probs) > 0.0):
        raise ValueError("probabilities that are none")
