"""Beam search: which beams go on, which have ended, and when no beam can improve the outputs any more.

Decides as `_beam_search` of transformers does (Wu et al. 2016, section 7, without coverage). Knows tokens and scores;
must not know models, nor which guesses were scored ahead.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from core.records import BeamSearch, Likeliest


@dataclass(frozen=True, slots=True)
class Beam:
    """An output so far, with the sum of the log probabilities of its tokens."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class EndedBeam:
    """An output that has ended: by an ending token, or because it has as many tokens as are allowed."""

    beam: Beam
    score: float
    """Score of the beam, divided by its length to the power of the length penalty."""


class Beams:
    """The beams of one request.

    Invariant: all live beams have the same number of tokens, and are ordered by score.
    """

    def __init__(self, search: BeamSearch, ending_ids: Set[int], max_tokens: int, num_before: int = 0) -> None:
        """`num_before`: number of tokens of the prompt that count as the output's for its length: those that an
        encoder-decoder forces after its start token."""
        self._search = search
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._num_before = num_before
        self.live: list[Beam] = [Beam()]
        self.ended: list[EndedBeam] = []
        """At most as many as beams, best first."""

    @staticmethod
    def num_likeliest(search: BeamSearch, num_ending_ids: int) -> int:
        """Number of tokens after each beam that decide a step: enough for all beams to go on from one, although every
        token that ends it is likelier."""
        return search.width + num_ending_ids

    def step(self, likeliest: Sequence[Likeliest]) -> None:
        """Extend each live beam by its likeliest tokens, and keep the best. On ties the better beam, then the lower id.

        A beam that ends counts only if it is among the best `width` of all continuations.
        """
        found = [
            (-(beam.score + logprob), number, token, logprob)
            for number, (beam, each) in enumerate(zip(self.live, likeliest, strict=True))
            for token, logprob in each
        ]
        found.sort()
        width, beams = self._search.width, self.live
        num_tokens = len(beams[0].tokens) + 1
        self.live = []
        for rank, (cost, number, token, logprob) in enumerate(found):
            parent = beams[number]
            beam = Beam((*parent.tokens, token), (*parent.logprobs, logprob), -cost)
            if token not in self._ending_ids and num_tokens < self._max_tokens:
                self.live.append(beam)
            elif rank < width:
                self.ended.append(EndedBeam(beam, beam.score / self._divisor(num_tokens)))
        del self.live[width:]
        self.ended.sort(key=lambda each: -each.score)
        del self.ended[width:]

    @property
    def is_done(self) -> bool:
        search = self._search
        if not self.live:
            return True
        if len(self.ended) < search.width:
            return False
        if search.early_stopping is True:
            return True
        is_longest = search.early_stopping == "never" and search.length_penalty > 0
        length = self._max_tokens if is_longest else len(self.live[0].tokens)
        return self.live[0].score / self._divisor(length) <= self.ended[-1].score

    @property
    def outputs(self) -> list[EndedBeam]:
        """The outputs, best first. Fewer than asked for only if masks allow no more."""
        return self.ended[: self._search.num_outputs]

    @property
    def num_shared(self) -> int:
        """Number of tokens with which all live beams begin."""
        first, last = min(beam.tokens for beam in self.live), max(beam.tokens for beam in self.live)
        pairs = zip(first, last, strict=True)
        return next((number for number, (one, other) in enumerate(pairs) if one != other), len(first))

    def _divisor(self, num_tokens: int) -> float:
        return float((num_tokens + self._num_before) ** self._search.length_penalty)
