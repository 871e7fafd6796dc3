"""The closed forms give the figures that the literature prints; where they do not, the test says what was printed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import theory

rates = st.floats(0.0, 0.99)
costs = st.floats(0.0, 2.0)
lengths = st.integers(0, 12)


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_operations_against_speed_without_a_cost_of_drafting(alpha, gamma, operations, speed):
    """Leviathan et al. 2023, Table 1."""
    assert theory.operations_factor(alpha, gamma) == pytest.approx(operations, abs=0.005)
    assert theory.walltime_factor(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)
    assert theory.memory_factor(alpha, gamma) == pytest.approx(1 / speed, abs=0.005)


def test_a_bigram_that_costs_nothing():
    """Leviathan et al. 2023, section 3.6: alpha = 0.2, gamma = 3, "1.25X"; no gamma could do better than 1 / 0.8."""
    assert theory.walltime_factor(0.2, 3, 0.0) == pytest.approx(1.25, abs=0.005)
    assert theory.oracle_factor(0.2, 0.0) == pytest.approx(1.25)


@pytest.mark.parametrize(("alpha", "factor"), [(0.75, 3.3), (0.8, 3.9), (0.87, 4.9)])
def test_lenience_when_greedy(alpha, factor):
    """Leviathan et al. 2023, section A.5: c = 0.015, gamma = 8, for lenience 1 and 0.5, 0.3, and 0.1."""
    assert theory.walltime_factor(alpha, 8, 0.015) == pytest.approx(factor, abs=0.05)


def test_an_oracle_for_gamma_gains_up_to_sixty_percent():
    """Leviathan et al. 2023, section 3.5: "up to ~60% higher" for typical c and alpha."""
    gains = []
    for alpha in np.arange(0.5, 0.951, 0.05):
        for c in (0.01, 0.02, 0.05):
            best = max(theory.walltime_factor(alpha, gamma, c) for gamma in range(theory.MAX_GAMMA + 1))
            gains.append(theory.oracle_factor(alpha, c) / best)
    assert min(gains) >= 1.0
    assert max(gains) == pytest.approx(1.6, abs=0.05)


def test_tokens_of_a_pass_with_five_guesses():
    """A tutorial on speculative decoding: alpha 0.7, 0.8 and 0.9 at K = 5 give "about" 2.9, 3.7 and 4.7.

    Its "only ~1.6" at 0.4 is 1.66 cut off, not rounded.
    """
    tokens = [theory.expected_tokens(alpha, 5) for alpha in (0.7, 0.8, 0.9, 0.4)]
    assert tokens == pytest.approx([2.9, 3.7, 4.7, 1.66], abs=0.05)


def test_ten_guesses_that_are_accepted_in_four_of_five_places():
    """Stratos, Speculative Decoding, section 1.1.1: "> 4 tokens"."""
    assert theory.expected_tokens(0.8, 10) == pytest.approx(4.57, abs=0.005)


def test_four_guesses_accepted():
    """An essay on n-gram drafts prints 0.94, 2.05 and 3.28 at alpha 0.5, 0.7 and 0.9 with D = 4.

    Only the first is right. Its formula, sum_{k=0}^{D} k alpha^k (1 - alpha) + D alpha^D, counts k = D twice: once too
    often by D alpha^D (1 - alpha). As written it gives 1.06, 2.06 and 3.36, so it does not give its own figures either.
    """
    alphas = (0.5, 0.7, 0.9)
    accepted = [theory.expected_longest(alpha, 4, num_drafts=1) for alpha in alphas]
    assert accepted == pytest.approx([0.94, 1.77, 3.10], abs=0.005)
    printed = [sum(k * alpha**k * (1 - alpha) for k in range(5)) + 4 * alpha**4 for alpha in alphas]
    assert printed == pytest.approx([1.06, 2.06, 3.36], abs=0.005)
    too_many = [4 * alpha**4 * (1 - alpha) for alpha in alphas]
    assert np.subtract(printed, too_many) == pytest.approx(accepted)


@given(alpha=rates, gamma=lengths)
def test_one_draft_is_the_best_of_one(alpha, gamma):
    assert theory.expected_longest(alpha, gamma, 1) + 1 == pytest.approx(theory.expected_tokens(alpha, gamma))


def test_drafts_side_by_side_by_hand():
    """Two chains of one guess are both wrong in a quarter of all rounds; and no number of them is more than gamma."""
    assert theory.expected_longest(0.5, 1, 2) == 0.75
    assert theory.expected_longest(0.5, 2, 2) == pytest.approx(0.75 + 1 - 0.75**2)
    assert theory.expected_longest(0.5, 3, 1000) == pytest.approx(3)


@given(alpha=rates, c=costs)
def test_the_best_gamma_gains_what_the_corollary_promises(alpha, c):
    best = theory.optimal_gamma(lambda gamma: theory.walltime_factor(alpha, gamma, c))
    factor = theory.walltime_factor(alpha, best, c)
    assert factor >= theory.guaranteed_factor(alpha, c) - 1e-12
    assert factor <= theory.oracle_factor(alpha, c) + 1e-12
    if alpha < c:
        assert (best, factor) == (0, 1.0), "nothing is gained where a guess costs more than it is worth"


@given(alpha=rates, c=costs, gamma=lengths, hit_rate=st.floats(0.0, 1.0))
def test_hiding_the_draft_never_costs_and_at_most_doubles(alpha, c, gamma, hit_rate):
    in_turn, hidden = theory.walltime_factor(alpha, gamma, c), theory.pipelined_factor(alpha, gamma, c, hit_rate)
    assert in_turn - 1e-12 <= hidden <= 2 * in_turn + 1e-12
    assert theory.pipelined_factor(alpha, gamma, c, 0.0) == pytest.approx(in_turn)


def test_a_hidden_draft_is_free_until_it_takes_as_long_as_the_target():
    assert theory.pipelined_factor(0.8, 4, 0.25) == theory.expected_tokens(0.8, 4)
    assert theory.pipelined_factor(0.8, 4, 0.5) == theory.expected_tokens(0.8, 4) / 2
    assert theory.optimal_gamma(lambda gamma: theory.pipelined_factor(0.8, gamma, 0.125)) == 8


def test_a_chain_whose_acceptance_changes_with_depth():
    assert theory.chain_tokens([]) == 1
    assert theory.chain_tokens([0.5, 1.0, 0.5]) == 1 + 0.5 + 0.5 + 0.25


def test_the_shortest_of_equal_drafts():
    assert theory.optimal_gamma(lambda gamma: theory.walltime_factor(0.0, gamma, 0.0)) == 0
    assert theory.optimal_gamma(lambda gamma: float(gamma), max_gamma=5) == 5
    assert theory.oracle_factor(1.0, 0.0) == float("inf")
