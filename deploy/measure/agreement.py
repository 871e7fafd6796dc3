"""How often guesses agree with a target's output: acceptance by depth, for a draft and for guessers without a model.

Knows recordings as arrays and the rules of verification; must not know models. A chain of guesses begins at every
position of a text, so that a few texts are enough. Guesses after a rejected one are not counted.
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
    """The number of positions by depth of the guess, counted from 0; expected values if acceptance is random."""

    reached: Float64
    """Positions where all guesses at lower depths were accepted and the text continues."""
    guessed: Float64
    """Positions of `reached` that have a guess."""
    accepted: Float64
    """Positions of `guessed` whose guess was accepted."""

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.reached + other.reached, self.guessed + other.guessed, self.accepted + other.accepted)

    @property
    def alpha(self) -> float:
        """Acceptance rate of the first guess, over all positions that have one."""
        return _ratio(self.accepted[0], self.guessed[0])

    @property
    def coverage(self) -> float:
        return _ratio(self.guessed[0], self.reached[0])

    @property
    def by_depth(self) -> list[float]:
        """Acceptance rate of a guess at each depth, if all before it were accepted; NaN where there was no guess."""
        return [_ratio(*pair) if pair[1] else float("nan") for pair in zip(self.accepted, self.guessed, strict=True)]

    @property
    def rates(self) -> list[float]:
        """Like `by_depth`, but a missing guess counts as rejected: the input of `core.theory.chain_tokens`."""
        return [_ratio(*pair) for pair in zip(self.accepted, self.reached, strict=True)]


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def empty_agreement(depth: int) -> Agreement:
    """The agreement before any text is counted."""
    return Agreement(np.zeros(depth), np.zeros(depth), np.zeros(depth))


def coupled(guesses: Sequence[int], output: Sequence[int], depth: int) -> Agreement:
    """The agreement of a draft that draws with the target's noise: a guess equal to the output's token is accepted."""
    is_same = np.array([guess == token for guess, token in zip(guesses, output, strict=True)], dtype=np.float64)
    return _chains(is_same, is_same, depth)


def rejection(log_p: Float32, log_q: Float32, output: Sequence[int], q_top_tokens: int, depth: int) -> Agreement:
    """The expected agreement of a draft that samples from q, cut to `q_top_tokens` tokens.  # p, q: [N, V]

    The first guesses x of a chain are drawn and accepted with probability prod min(p(x_i), q(x_i)). The text was drawn
    from p, so a position has the weight prod min(1, q(x_i) / p(x_i)) over the positions before it in the chain, and its
    guess is accepted with probability sum_x min(p, q).
    """
    p, q = np.exp(log_p.astype(np.float64)), _cut(np.exp(log_q.astype(np.float64)), q_top_tokens)
    positions = np.arange(len(output))
    own_p, own_q = p[positions, list(output)], q[positions, list(output)]
    return _chains(np.minimum(own_q / own_p, 1.0), np.minimum(p, q).sum(axis=1), depth)


def _cut(q: Float64, top_tokens: int) -> Float64:
    """q as rejection verification defines it: the likeliest tokens that hold `Q_MASS`, at most `top_tokens`,
    renormalised."""
    kept = np.argsort(-q, axis=1)[:, :top_tokens]
    held, cut = np.take_along_axis(q, kept, axis=1), np.zeros_like(q)
    is_within = held.cumsum(axis=1) - held < Q_MASS
    np.put_along_axis(cut, kept, np.where(is_within, held, 0.0), axis=1)
    whole: Float64 = cut / cut.sum(axis=1, keepdims=True)
    return whole


def _chains(weights: Float64, chances: Float64, depth: int) -> Agreement:
    """The agreement of chains from each position. Guesses are accepted with `chances`, followed with `weights`."""
    reached, accepted = np.zeros(depth), np.zeros(depth)
    arriving = np.ones(len(weights))
    for level in range(min(depth, len(weights))):
        arriving = arriving[: len(weights) - level]  # positions after which the text is longer than this depth
        reached[level] = arriving.sum()
        accepted[level] = (arriving * chances[level:]).sum()
        arriving = arriving * weights[level:]
    return Agreement(reached, reached.copy(), accepted)


@dataclass(frozen=True, slots=True)
class GuesserAgreement:
    """The agreement of a guesser on one or more texts, by kind of verification."""

    coupled: Agreement
    rejection: Agreement
    propose_s: float
    """Processor time of all proposals together, in seconds."""

    def __add__(self, other: GuesserAgreement) -> GuesserAgreement:
        both = self.coupled + other.coupled, self.rejection + other.rejection
        return GuesserAgreement(*both, self.propose_s + other.propose_s)

    @property
    def guess_s(self) -> float:
        """Processor time of one proposal, in seconds."""
        return _ratio(self.propose_s, self.coupled.reached[0])


def of_guesser(
    guesser: Guesser, prompt: Sequence[int], output: Sequence[int], log_p: Float32, depth: int
) -> GuesserAgreement:
    """Ask the guesser at each position of a text, as a session does.

    Coupled and greedy verification follow the proposed tree. Rejection verifies its first chain; the guesser has q = 1
    for each of its tokens, so that a token is accepted with p(token).
    """
    text, whole = list(prompt), [*prompt, *output]
    coupled, rejection, propose_s = empty_agreement(depth), empty_agreement(depth), 0.0
    for position in range(len(output)):
        began_s = time.thread_time()
        guesses = guesser.propose(text)
        propose_s += time.thread_time() - began_s
        rest = output[position : position + depth]
        coupled += _coupled_agreement(guesses, rest, depth)
        rejection += _rejection_agreement(guesses, rest, log_p[position : position + depth], depth)
        text.append(whole[len(text)])
    return GuesserAgreement(coupled, rejection, propose_s)


def _coupled_agreement(guesses: Guesses, rest: Sequence[int], depth: int) -> Agreement:
    """Follow the tree as long as it has the text's next token."""
    found, node = empty_agreement(depth), ROOT
    for level, token in enumerate(rest):
        below = [each for each, parent in enumerate(guesses.parents) if parent == node]
        right = next((each for each in below if guesses.tokens[each] == token), None)
        found.reached[level], found.guessed[level], found.accepted[level] = 1.0, bool(below), right is not None
        if right is None:
            break
        node = right
    return found


def _rejection_agreement(guesses: Guesses, rest: Sequence[int], log_p: Float32, depth: int) -> Agreement:
    """Follow the first chain as long as it has the text's next token; each guess counts with its p."""
    found, node = empty_agreement(depth), ROOT
    for level, token in enumerate(rest):
        found.reached[level] = 1.0
        if node not in guesses.parents:
            break
        node = guesses.parents.index(node)
        found.guessed[level], found.accepted[level] = 1.0, np.exp(log_p[level, guesses.tokens[node]])
        if guesses.tokens[node] != token:
            break
    return found
