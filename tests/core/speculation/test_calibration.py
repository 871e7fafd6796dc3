"""Estimates of acceptance: they converge, follow a change, shrink to what is shared, and tell what they cannot know."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.calibration import MAX_CHANCE, ConfidenceFit, DepthRates, Rate, logistic, logit


def feed(rate, chance, num, random):
    for _ in range(num):
        rate.see(random.random() < chance)


def test_a_rate_converges_and_follows_a_change():
    random, rate = Random(1), Rate(0.7, weight=8.0, window=200.0)
    feed(rate, 0.9, 2000, random)
    assert rate.mean() == pytest.approx(0.9, abs=0.05)
    feed(rate, 0.3, 1000, random)
    assert rate.mean() == pytest.approx(0.3, abs=0.11)


def test_a_rate_of_which_little_was_seen_is_the_shared_prior():
    rate = Rate(0.7, weight=8.0)
    assert rate.mean() == 0.7
    assert rate.mean(0.2) == pytest.approx(0.2)
    rate.see(True)
    assert rate.mean(0.2) == pytest.approx((1 + 8 * 0.2) / 9)


@given(st.floats(0.006, 0.994))
def test_logistic_undoes_logit(chance):
    assert logistic(logit(chance)) == pytest.approx(chance)


# By depth


def test_deep_places_that_few_have_seen_are_like_those_before_them():
    rates = DepthRates(0.7, weight=12.0, window=600.0, depth=4)
    assert rates.chances(6) == pytest.approx([0.7] * 6)
    for index in range(400):
        rates.see_chain(1, index % 10 != 0)
    assert rates.chances(4) == pytest.approx([0.9] * 4, abs=0.02)


def test_depths_have_chances_of_their_own():
    rates = DepthRates(0.7, weight=12.0, window=600.0, depth=4)
    for index in range(400):
        rates.see_chain(2, 2 if index % 2 else 1)
    first, second, third = rates.chances(3)
    assert first == pytest.approx(1.0, abs=0.03)
    assert second == third == pytest.approx(0.5, abs=0.05)
    assert rates.survival(3) == pytest.approx([first, first * second, first * second * third])
    assert rates.rates[2].seen == 0, "what follows a guess that was refused was not judged"


def test_what_is_deeper_than_is_kept_apart_counts_for_the_deepest():
    rates = DepthRates(0.5, weight=1.0, window=600.0, depth=2)
    rates.see(9, True)
    assert [rate.seen for rate in rates.rates] == [0, 1]


# Confidence


def chance_by(fit, confidence):
    """What the line of a fit says of a guess that was made with this confidence."""
    intercept, slope = fit.line()
    return min(logistic(intercept + slope * logit(confidence)), MAX_CHANCE)


def test_confidence_that_tells_is_made_use_of():
    random, fit = Random(7), ConfidenceFit()
    for _ in range(3000):
        confidence = random.choice((0.3, 0.6, 0.9))
        chance = logistic(logit(0.7) + 1.0 * (logit(confidence) - logit(0.6)))
        fit.see(confidence, random.random() < chance)
    for confidence in (0.3, 0.6, 0.9):
        expected = logistic(logit(0.7) + 1.0 * (logit(confidence) - logit(0.6)))
        assert chance_by(fit, confidence) == pytest.approx(expected, abs=0.06)


def test_confidence_that_tells_nothing_leaves_the_expectation():
    random, fit = Random(8), ConfidenceFit()
    assert chance_by(fit, 0.99) == pytest.approx(0.7, abs=0.001)
    for _ in range(2000):
        fit.see(random.random(), random.random() < 0.7)
    for confidence in (0.2, 0.5, 0.8):
        assert chance_by(fit, confidence) == pytest.approx(0.7, abs=0.07)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_whatever_is_seen_the_estimate_stays_a_chance_and_rises_with_confidence(seen):
    fit = ConfidenceFit()
    for confidence, is_accepted in seen:
        fit.see(confidence, is_accepted)
    chances = [chance_by(fit, confidence) for confidence in (0.0, 0.2, 0.5, 0.9, 1.0)]
    assert all(0 < chance < 1 and math.isfinite(chance) for chance in chances)
    assert chances == sorted(chances)
