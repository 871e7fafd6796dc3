"""Blocks drawn from a guesser's laws keep the target's own law; with noise that is used twice they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from core import noise
from core.exact.sampling import truncate
from core.noise import Purpose
from core.rules.chains import verify_block, verify_rejection
from core.speculation.token_tree import NO_Q, SparseDistribution, TokenTree
from orchestrator.guessers import drawing
from orchestrator.guessers.drawing import draw_chain, draw_from
from tests.core.rules.decoding import SIGNIFICANCE, VOCAB_SIZE, Decoder, NoiseTable, count, dirichlet, log, p_value

NUM_DRAWS = 2_500
BOTH = pytest.mark.parametrize("verify", [pytest.param(verify_rejection, marks=pytest.mark.thorough), verify_block])
P, Q = dirichlet(1), dirichlet(2)
MEMORY = {last: truncate(log(row), 1 + last % 4, math.inf) if last else NO_Q for last, row in enumerate(Q)}
"""Much is known about some tokens, nothing about the first."""


@dataclass
class GuesserDecoder(Decoder):
    """A guesser says laws of one token before: whether another guess is drawn depends on what it says there."""

    min_chance: float = 0.0
    looks_ahead: bool = False
    """Whether a draw is dropped because of what would follow it."""

    def law(self, last):
        return self.q_records[last]

    def chain(self, seed, position, last, purpose=Purpose.DRAFT):
        drawn = draw_chain(
            lambda tokens: self.law((last, *tokens)[-1]),
            lambda chances: len(chances) <= self.gamma and chances[-1] >= self.min_chance,
            seed,
            position,
        )
        num = len(drawn)
        while self.looks_ahead and num and max(self.law(drawn.tokens[num - 1]).probs, default=0.0) < 0.6:
            num -= 1
        return TokenTree.chain(drawn.tokens[:num], drawn.distributions[:num])


def is_exact(decoder, monkeypatch, verify):
    monkeypatch.setattr(drawing, "noise", decoder.noise)
    return p_value(count(decoder, 2, monkeypatch, verify), decoder.p) > SIGNIFICANCE


def decoder(p=P, q=Q, remap=None, **changes):
    table = NoiseTable(NUM_DRAWS) if remap is None else NoiseTable(NUM_DRAWS, remap)
    return GuesserDecoder(p, q, 2, table, **changes)


def constant(law):
    """The Markov chain that ignores its context."""
    return np.tile([*law, *[0] * (VOCAB_SIZE - len(law))], (VOCAB_SIZE, 1))


@BOTH
@pytest.mark.parametrize("min_chance", [0.0, 0.45])
def test_the_output_follows_the_target_however_long_chains_are(verify, min_chance, monkeypatch):
    assert is_exact(decoder(min_chance=min_chance), monkeypatch, verify)


@BOTH
def test_the_output_follows_the_target_where_little_is_known(verify, monkeypatch):
    class Forgetful(GuesserDecoder):
        def law(self, last):
            return MEMORY[last]

    assert is_exact(Forgetful(P, Q, 2, NoiseTable(NUM_DRAWS)), monkeypatch, verify)


def draws_reuse(purpose):
    return lambda position, row, own: (position, row, purpose if own is Purpose.GUESS else own)


@BOTH
def test_guesses_may_not_be_drawn_with_the_noise_that_decides_on_them(verify, monkeypatch):
    assert not is_exact(decoder(remap=draws_reuse(Purpose.ACCEPT)), monkeypatch, verify)


@BOTH
def test_guesses_may_not_be_drawn_with_the_noise_of_the_residual(verify, monkeypatch):
    """Token 1 is drawn by small numbers, which are small noise of token 0: then that would lose the residual."""
    p, q = constant([0.6, 0.1, 0.3]), constant([0.4, 0.6, 0.0])
    assert is_exact(decoder(p, q), monkeypatch, verify)
    assert not is_exact(decoder(p, q, remap=draws_reuse(Purpose.RESIDUAL)), monkeypatch, verify)


@BOTH
def test_a_draw_may_not_be_dropped_because_of_what_follows_it(verify, monkeypatch):
    """The order of the questions forbids it: what is said after a draw is not known when it is drawn."""
    assert not is_exact(decoder(q=P, looks_ahead=True), monkeypatch, verify)


@dataclass
class Remembers(Decoder):
    """Each output is guessed by one of another request, whose guesses were always the same."""

    apart: int = 0
    """Its seed, from this one's."""
    known: tuple[int, ...] = ()

    def chain(self, seed, position, last, purpose=Purpose.DRAFT):
        tokens = self.known[position - 1 : position - 1 + self.gamma]
        return TokenTree.chain(tokens, [SparseDistribution.certain(token) for token in tokens])

    def decode(self, seed, num_tokens, verify=None):
        self.known = (0,) * num_tokens
        self.known = super().decode((seed + self.apart) % self.noise.num_seeds, num_tokens, verify)
        return super().decode(seed, num_tokens, verify)


@BOTH
def test_an_output_may_not_guess_another_of_the_same_seed(verify, monkeypatch):
    """Recent outputs would guess a repetition so: what drew the first would judge the second."""
    p = constant([0.5, 0.5])
    assert is_exact(Remembers(p, Q, 2, NoiseTable(NUM_DRAWS), apart=1), monkeypatch, verify)
    assert not is_exact(Remembers(p, Q, 2, NoiseTable(NUM_DRAWS), apart=0), monkeypatch, verify)


LAW = SparseDistribution((5, 2, 7), (0.5, 0.3, 0.2))


def test_draws_have_their_law_and_are_the_same_again():
    draws = [draw_from(LAW, seed, 9, 1) for seed in range(20_000)]
    assert draws == [draw_from(LAW, seed, 9, 1) for seed in range(20_000)]
    seen = [draws.count(token) for token in LAW.token_ids]
    assert stats.chisquare(seen, 20_000 * np.array(LAW.probs)).pvalue > SIGNIFICANCE


def test_a_law_counts_as_normalised_as_rules_take_it():
    doubled = SparseDistribution(LAW.token_ids, tuple(2.0 * prob for prob in LAW.probs))
    for seed in range(200):
        assert draw_from(doubled, seed, 0, 0) == draw_from(LAW, seed, 0, 0)


def test_each_draw_has_the_noise_of_its_place_and_row(monkeypatch):
    asked = []

    def uniform(*key):
        asked.append(key)
        return 0.99

    monkeypatch.setattr(noise, "uniform", uniform)
    drawn = draw_chain(lambda _: LAW, lambda chances: len(chances) < 4, seed=11, num_committed=6)
    assert asked == [(11, 6 + row, row, Purpose.GUESS) for row in range(3)]
    assert (drawn.tokens, drawn.distributions, drawn.chances) == ((7, 7, 7), (LAW,) * 3, (0.5,) * 3)


def test_whether_to_draw_is_asked_before_and_shown_nothing_of_the_draw():
    """The same chances, whatever will be drawn; and a law is asked for only below what has been drawn."""
    shown, below = [], []

    def distribution_after(drawn):
        below.append(drawn)
        return LAW if len(drawn) < 2 else NO_Q

    def goes_on(chances):
        shown.append(chances)
        return True

    chains = [draw_chain(distribution_after, goes_on, seed, 0).tokens for seed in range(10)]
    assert len(set(chains)) > 3
    assert shown == [[0.5], [0.5, 0.5]] * 10
    assert below == [tokens[:num] for tokens in chains for num in range(3)]


def test_counts_become_shares_that_float32_holds_exactly():
    law = SparseDistribution.of_counts({4: 1, 8: 5, 6: 1}, 9)
    assert law.token_ids == (8, 4, 6)
    assert law.probs == tuple(np.array([5, 1, 1], np.float32) / np.float32(7))
    assert np.array(law.probs, np.float32).tolist() == list(law.probs)
    assert SparseDistribution.of_counts({4: 1, 8: 5, 6: 1}, 2) == SparseDistribution((8, 4), law_of(5, 1))


def law_of(*counts):
    shares = np.array(counts, np.float32)
    return tuple((shares / shares.sum()).tolist())
