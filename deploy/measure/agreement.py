"""How far guesses agree with what a target wrote: acceptance by depth, for a draft and for guessers without a model.

Knows recordings as arrays and the laws of verification; must not know models. Every place of a text begins a chain:
so a few texts say as much as can be said. A chain's guesses below one that was not accepted count for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.exact import Q_MASS
from core.speculation import ROOT, Guesser, Guesses

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Numbers of places by depth, from 0; they are expected values where acceptance is a matter of chance."""

    reached: Float64
    """Places whose guesses above were all accepted, and where the text goes on."""
    guessed: Float64
    """Of these, those with a guess."""
    accepted: Float64
    """Of these, those whose guess was accepted."""

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.reached + other.reached, self.guessed + other.guessed, self.accepted + other.accepted)

    @property
    def alpha(self) -> float:
        """Acceptance rate of a guess, over all places that have one."""
        return _ratio(self.accepted[0], self.guessed[0])

    @property
    def coverage(self) -> float:
        """Share of places that have a guess."""
        return _ratio(self.guessed[0], self.reached[0])

    @property
    def by_depth(self) -> list[float]:
        """Acceptance rate of a guess at each depth, if those above it were accepted; NaN where there was none."""
        return [_ratio(*pair) if pair[1] else float("nan") for pair in zip(self.accepted, self.guessed, strict=True)]

    @property
    def rates(self) -> list[float]:
        """The same for a place that may have no guess: what `core.theory.chain_tokens` asks for."""
        return [_ratio(*pair) for pair in zip(self.accepted, self.reached, strict=True)]


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def nothing(depth: int) -> Agreement:
    """Before any text."""
    return Agreement(np.zeros(depth), np.zeros(depth), np.zeros(depth))


def coupled(guesses: Sequence[int], output: Sequence[int], depth: int) -> Agreement:
    """Of a draft whose guess at each place is known: accepted where it is the token, with the same noise."""
    is_same = np.array([guess == token for guess, token in zip(guesses, output, strict=True)], dtype=np.float64)
    return _chains(is_same, is_same, depth)


def rejection(log_p: Float32, log_q: Float32, output: Sequence[int], q_top_tokens: int, depth: int) -> Agreement:
    """Of a draft that samples from its q, cut to `q_top_tokens` tokens, expected from both distributions [N, V].

    A chain from q is accepted down to a prefix x with probability prod min(p(x_i), q(x_i)). Texts come from p, so each
    place counts for prod min(1, q(x_i) / p(x_i)) of the places above it, and the guess there for sum_x min(p, q).
    """
    p, q = np.exp(log_p.astype(np.float64)), _cut(np.exp(log_q.astype(np.float64)), q_top_tokens)
    places = np.arange(len(output))
    own_p, own_q = p[places, list(output)], q[places, list(output)]
    return _chains(np.minimum(own_q / own_p, 1.0), np.minimum(p, q).sum(axis=1), depth)


def _cut(q: Float64, top_tokens: int) -> Float64:
    """What q is defined as: the likeliest tokens of each row that hold `Q_MASS`, `top_tokens` at most, renormalised."""
    kept = np.argsort(-q, axis=1)[:, :top_tokens]
    held, cut = np.take_along_axis(q, kept, axis=1), np.zeros_like(q)
    is_within = held.cumsum(axis=1) - held < Q_MASS
    np.put_along_axis(cut, kept, np.where(is_within, held, 0.0), axis=1)
    whole: Float64 = cut / cut.sum(axis=1, keepdims=True)
    return whole


def _chains(weights: Float64, chances: Float64, depth: int) -> Agreement:
    """A chain at each place: `chances` that its guess is accepted, `weights` of what is below a guess at that place."""
    reached, accepted = np.zeros(depth), np.zeros(depth)
    arriving = np.ones(len(weights))
    for level in range(min(depth, len(weights))):
        arriving = arriving[: len(weights) - level]  # places from which the text goes on so far
        reached[level] = arriving.sum()
        accepted[level] = (arriving * chances[level:]).sum()
        arriving = arriving * weights[level:]
    return Agreement(reached, reached.copy(), accepted)


@dataclass(frozen=True, slots=True)
class GuesserAgreement:
    """Of a guesser on one text or more."""

    coupled: Agreement
    rejection: Agreement
    propose_s: float
    """Of all proposals together."""

    def __add__(self, other: GuesserAgreement) -> GuesserAgreement:
        both = self.coupled + other.coupled, self.rejection + other.rejection
        return GuesserAgreement(*both, self.propose_s + other.propose_s)

    @property
    def guess_s(self) -> float:
        """Of one proposal."""
        return _ratio(self.propose_s, self.coupled.reached[0])


def of_guesser(
    guesser: Guesser, prompt: Sequence[int], output: Sequence[int], log_p: Float32, depth: int
) -> GuesserAgreement:
    """Ask at each place of a text, as a session would that came by there.

    Coupled and greedy verification follow the proposed tree. Rejection has its first chain, whose tokens are as good as
    certain to their guesser: each is accepted with p(token).
    """
    text, whole = list(prompt), [*prompt, *output]
    coupled, rejection, propose_s = nothing(depth), nothing(depth), 0.0
    for place in range(len(output)):
        began_s = time.thread_time()
        guesses = guesser.propose(text)
        propose_s += time.thread_time() - began_s
        rest = output[place : place + depth]
        coupled += _followed(guesses, rest, depth)
        rejection += _judged(guesses, rest, log_p[place : place + depth], depth)
        text.append(whole[len(text)])
    return GuesserAgreement(coupled, rejection, propose_s)


def _followed(guesses: Guesses, rest: Sequence[int], depth: int) -> Agreement:
    """Down the tree as far as it has what the text has."""
    found, node = nothing(depth), ROOT
    for level, token in enumerate(rest):
        below = [each for each, parent in enumerate(guesses.parents) if parent == node]
        right = next((each for each in below if guesses.tokens[each] == token), None)
        found.reached[level], found.guessed[level], found.accepted[level] = 1.0, bool(below), right is not None
        if right is None:
            break
        node = right
    return found


def _judged(guesses: Guesses, rest: Sequence[int], log_p: Float32, depth: int) -> Agreement:
    """Down the first chain as far as the text goes that way, each guess for what p makes of it."""
    found, node = nothing(depth), ROOT
    for level, token in enumerate(rest):
        found.reached[level] = 1.0
        if node not in guesses.parents:
            break
        node = guesses.parents.index(node)
        found.guessed[level], found.accepted[level] = 1.0, np.exp(log_p[level, guesses.tokens[node]])
        if guesses.tokens[node] != token:
            break
    return found
