"""The closed forms agree with published figures, with each other, and with what the real code does."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import theory
from core.noise import Purpose
from core.rules import chains as acceptance
from core.rules.chains import verify_block, verify_rejection
from tests.core.rules import laws
from tests.core.rules.decoding import VOCAB_SIZE, Decoder, NoiseTable, dirichlet, log

NUM_DRAWS = 10_000
RULES = {verify_rejection: laws.rejection_survival, verify_block: laws.block_survival}
some_law = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(lambda xs: np.array(xs) / sum(xs))


def test_motivating_example_of_block_verification():
    """Sun et al. 2024, section 2: 10/9 tokens by rejection, 11/9 by block verification, 12/9 knowing the joint law."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    survivals = (laws.rejection_survival, laws.block_survival, laws.joint_survival)
    expected = [laws.expected_accepted(p, q, 2, survival) for survival in survivals]
    assert expected == pytest.approx([10 / 9, 11 / 9, 12 / 9])


@settings(deadline=None)
@given(p=some_law, q=some_law, gamma=st.integers(1, 3))
def test_block_verification_accepts_at_least_as_much_as_rejection(p, q, gamma):
    survivals = (laws.rejection_survival, laws.block_survival, laws.joint_survival)
    rejection, block, joint = (laws.expected_accepted(p, q, gamma, survival) for survival in survivals)
    assert rejection <= block + 1e-12
    assert block <= joint + 1e-12
    assert rejection + 1 == pytest.approx(theory.expected_tokens(laws.acceptance_rate(p, q), gamma))


@settings(deadline=None)
@given(p=some_law, q=some_law)
def test_coupled_acceptance_lies_between_its_bounds(p, q):
    coupled = laws.coupled_acceptance_rate(p, q)
    assert laws.coupled_lower_bound(p, q) - 1e-12 <= coupled <= laws.acceptance_rate(p, q) + 1e-12


def test_limits_of_the_closed_forms():
    p, q = np.array([0.25, 0.75, 0, 0]), np.array([0, 0, 0.5, 0.5])
    assert laws.acceptance_rate(p, p) == laws.coupled_acceptance_rate(p, p) == 1
    assert laws.acceptance_rate(p, q) == laws.coupled_acceptance_rate(p, q) == 0
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert theory.walltime_factor(0.8, 4, 0.05) == pytest.approx((1 - 0.8**5) / (0.2 * 1.2))
    assert theory.walltime_factor(0.0, 4, 0.05) < 1  # drafting in vain costs


@pytest.mark.thorough
@pytest.mark.parametrize("verify", RULES)
def test_accepted_length_is_what_the_theory_says(verify, monkeypatch):
    table = NoiseTable(NUM_DRAWS)
    p, q = (np.tile(dirichlet(seed)[0], (VOCAB_SIZE, 1)) for seed in (1, 2))
    decoder = Decoder(p, q, gamma=2, noise=table)
    monkeypatch.setattr(acceptance, "noise", table)
    monkeypatch.setattr("core.rules.rule.noise", table)
    blocks = [decoder.chain(seed, 1, 0) for seed in range(NUM_DRAWS)]
    lengths = [len(verify(block, p[: len(block) + 1], seed, 1)[0]) for seed, block in enumerate(blocks)]
    expected = laws.expected_accepted(p[0], q[0], 2, RULES[verify])
    assert np.mean(lengths) == pytest.approx(expected, abs=5 * np.std(lengths) / math.sqrt(NUM_DRAWS))


def test_coupled_acceptance_is_what_the_theory_says():
    p, q = dirichlet(1), dirichlet(2)
    table = NoiseTable(NUM_DRAWS)
    samples, guesses = (np.array(table.draws(log(law), 1, 0, Purpose.SHARED)) for law in (p, q))
    matches = (samples == guesses).mean(axis=0)
    expected = [laws.coupled_acceptance_rate(*pair) for pair in zip(p, q, strict=True)]
    assert matches == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(NUM_DRAWS))


def test_several_guesses_at_one_place():
    """Drawing twice from q = (1, 0) for p = (1/2, 1/2): the second is never right after the first was wrong."""
    p, q, other = np.array([0.5, 0.5]), np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert laws.acceptance_rate_of_several(p, []) == 0
    assert laws.acceptance_rate_of_several(p, [q]) == laws.acceptance_rate(p, q) == 0.5
    assert laws.acceptance_rate_of_several(p, [q, q]) == 0.5
    assert laws.acceptance_rate_of_several(p, [q, other]) == 1
    assert laws.acceptance_rate_of_several(p, [p, q]) == 1


def test_the_divergence_is_what_it_is_called():
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.25, 0.25, 0.25, 0.25])
    middle = (p + q) / 2
    assert laws.divergence(p, q) == pytest.approx(np.abs(p - middle).sum()) == pytest.approx(0.3)
    assert laws.divergence(p, q) == laws.divergence(q, p) == pytest.approx(1 - laws.acceptance_rate(p, q))
    assert laws.divergence(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1
