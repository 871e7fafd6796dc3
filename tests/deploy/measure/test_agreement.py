"""Acceptance by depth is what can be counted by hand, and what the theory of verification says."""

from itertools import product

import numpy as np
import pytest

from core.speculation import ROOT, Guesses
from deploy.measure import agreement
from tests.core.rules import laws


class Script:
    """Proposes what is written down for each length of the text."""

    def __init__(self, proposals):
        self._proposals = proposals

    def propose(self, text):
        return self._proposals.get(len(text), Guesses())


def log(*rows):
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float32))


def test_a_coupled_chain_begins_at_every_place():
    found = agreement.coupled([1, 2, 9, 4], [1, 2, 3, 4], depth=3)
    assert found.reached.tolist() == found.guessed.tolist() == [4, 2, 1]
    assert found.accepted.tolist() == [3, 1, 0]
    assert (found.alpha, found.coverage) == (0.75, 1.0)
    assert found.by_depth == found.rates == [0.75, 0.5, 0.0]


def test_a_text_that_is_shorter_than_the_chain():
    found = agreement.coupled([1, 2], [1, 2], depth=4)
    assert found.reached.tolist() == [2, 1, 0, 0]
    assert np.isnan(found.by_depth[2:]).all()
    assert found.rates == [1, 1, 0, 0]


def test_agreements_of_several_texts_add_up():
    found = agreement.coupled([1], [1], depth=2) + agreement.coupled([1, 1], [1, 2], depth=2)
    assert found.reached.tolist() == [3, 1]
    assert found.accepted.tolist() == [2, 0]


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_rejection_over_all_texts_is_the_theory_s(gamma):
    """The last guess of a chain of gamma, averaged over the texts that p writes: P(all gamma are accepted)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    reached, accepted = 0.0, 0.0
    for text in product(range(3), repeat=gamma):
        found = agreement.rejection(log(*[p] * gamma), log(*[q] * gamma), text, 3, gamma)
        reached += np.prod(p[list(text)]) * found.reached[-1]
        accepted += np.prod(p[list(text)]) * found.accepted[-1]
    alpha = laws.acceptance_rate(p, q)
    assert reached == pytest.approx(alpha ** (gamma - 1))
    assert accepted == pytest.approx(alpha**gamma)


def test_rejection_with_the_q_that_is_served():
    """q is cut to its likeliest token: a point mass, accepted with p of it."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    found = agreement.rejection(log(p, p), log(q, q), [2, 0], q_top_tokens=1, depth=2)
    assert found.accepted == pytest.approx([0.4, 0.2])
    assert found.reached == pytest.approx([2, 1]), "min(1, q / p) of token 2 is 1"
    other = agreement.rejection(log(p, p), log(q, q), [0, 0], q_top_tokens=1, depth=2)
    assert other.reached == pytest.approx([2, 0]), "a chain that is accepted never goes by token 0"


def test_greedy_rejection_is_counting():
    p, q = log([0, 1, 0], [1, 0, 0]), log([0, 1, 0], [0, 0, 1])
    found = agreement.rejection(p, q, [1, 0], q_top_tokens=64, depth=2)
    counted = agreement.coupled([1, 2], [1, 0], depth=2)
    assert found.reached.tolist() == counted.reached.tolist() == [2, 1]
    assert found.accepted.tolist() == counted.accepted.tolist() == [1, 0]


def test_a_guesser_s_tree_is_followed_and_its_first_chain_judged():
    """Prompt of one token; the text 1 2 3. At the first position two branches: 5, and 1 with 2 and then 4 below."""
    tree = Guesses((ROOT, ROOT, 1, 2), (5, 1, 2, 4), (0.2, 0.8, 1.0, 1.0))
    p = log([0, 0.25, 0, 0, 0, 0.5], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0.5, 0.5, 0])
    found = agreement.of_guesser(Script({1: tree}), [7], [1, 2, 3], p, depth=3)
    assert found.coupled.reached.tolist() == [3, 1, 1]
    assert found.coupled.guessed.tolist() == [1, 1, 1]
    assert found.coupled.accepted.tolist() == [1, 1, 0]
    assert found.coupled.coverage == pytest.approx(1 / 3)
    assert found.rejection.reached.tolist() == [3, 0, 0], "the first chain is 5, which the text is not"
    assert found.rejection.accepted == pytest.approx([0.5, 0, 0])


def test_a_guesser_s_chain_by_rejection_goes_on_where_the_text_does():
    chain = Guesses.chain((1, 2), (1.0, 1.0))
    p = log([0, 0.25, 0.75], [0, 0.5, 0.5], [1, 0, 0])
    found = agreement.of_guesser(Script({1: chain}), [7], [1, 2, 0], p, depth=3)
    assert found.rejection.reached.tolist() == [3, 1, 1]
    assert found.rejection.guessed.tolist() == [1, 1, 0]
    assert found.rejection.accepted == pytest.approx([0.25, 0.5, 0])
    assert found.rejection.rates == pytest.approx([0.25 / 3, 0.5, 0])
