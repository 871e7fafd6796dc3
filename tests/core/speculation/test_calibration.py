"""Estimates of acceptance: they converge, follow a change, and stay chances."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.calibration import MAX_LOGIT, USUAL_TAIL, WINDOW, Average, Calibration, logistic, logit


def test_an_average_begins_with_what_is_expected_converges_and_follows_a_change():
    random, average = Random(1), Average(0.7)
    assert average.value == 0.7
    for chance in (0.9, 0.3):
        values = []
        for _ in range(20 * round(WINDOW)):
            average.observe(random.random() < chance)
            values.append(average.value)
        late = values[len(values) // 2 :]
        assert sum(late) / len(late) == pytest.approx(chance, abs=0.03)
    assert average.num_seen == 40 * round(WINDOW)


@given(st.floats(0.006, 0.994))
def test_logistic_undoes_logit(chance):
    assert logistic(logit(chance)) == pytest.approx(chance)


def test_chances_of_later_candidates_are_a_law():
    assert 0 < sum(USUAL_TAIL) <= 1.0
    assert list(USUAL_TAIL) == sorted(USUAL_TAIL, reverse=True)


# Calibration


def chance_by(calibration, confidence):
    return logistic(calibration.shift + logit(confidence))


def test_at_first_a_draft_is_believed():
    assert chance_by(Calibration(), 0.9) == pytest.approx(0.9)


@pytest.mark.parametrize("shift", [-2.0, 0.0, 1.0])
def test_a_draft_that_is_too_sure_or_not_sure_enough_is_seen_through(shift):
    random, found = Random(7), Calibration()
    shifts = []
    for _ in range(6000):
        confidence = random.choice((0.3, 0.6, 0.9))
        found.observe(confidence, random.random() < logistic(shift + logit(confidence)))
        shifts.append(found.shift)
    assert sum(shifts[3000:]) / 3000 == pytest.approx(shift, abs=0.15)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_whatever_is_seen_the_estimate_stays_a_chance_and_rises_with_sureness(seen):
    found = Calibration()
    for confidence, is_accepted in seen:
        found.observe(confidence, is_accepted)
    chances = [chance_by(found, confidence) for confidence in (0.0, 0.2, 0.5, 0.9, 1.0)]
    assert all(0 < chance < 1 and math.isfinite(chance) for chance in chances)
    assert chances == sorted(chances)
    assert abs(found.shift) <= MAX_LOGIT
