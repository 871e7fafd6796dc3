"""Forecasts by hand, and against completions that end as they were forecast."""

from __future__ import annotations

import pytest

from orchestrator.waits import PlaceTimes, until_free_s


@pytest.mark.parametrize(
    ("age_s", "num_tokens", "num_left", "expected_s"),
    [
        (2.0, 0, 10, 8.0),
        (2.0, 1, 10, 8.0),
        (2.0, 5, 10, 4.0),
        (15.0, 0, 10, 15.0),
        (15.0, 30, 10, 5.0),
        (0.0, 0, 9, 10.0),
    ],
)
def test_a_completion_takes_as_long_as_usual_unless_its_pace_says_less(age_s, num_tokens, num_left, expected_s):
    times = PlaceTimes()
    times.ended(10.0)
    assert times.left_s(age_s, num_tokens, num_left) == pytest.approx(expected_s)


def test_before_one_has_ended_its_own_pace_is_all_that_is_known():
    times = PlaceTimes()
    assert times.left_s(2.0, 4, 20) == pytest.approx(10.0)
    assert times.left_s(2.0, 0, 20) == pytest.approx(2.0)


def test_the_average_follows_the_recent_ones():
    times = PlaceTimes()
    for _ in range(100):
        times.ended(1.0)
    for _ in range(100):
        times.ended(5.0)
    assert times.average_s == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize(
    ("left_s", "num_before", "num_places", "expected_s"),
    [
        ([0.0], 0, 1, 0.0),
        ([3.0, 1.0], 0, 1, 1.0),
        ([3.0, 1.0], 1, 1, 3.0),
        ([3.0, 1.0], 2, 1, 11.0),
        ([3.0, 1.0], 0, 2, 3.0),
        ([3.0, 1.0], 3, 2, 21.0),
    ],
)
def test_each_that_waits_takes_the_place_that_is_free_first(left_s, num_before, num_places, expected_s):
    assert until_free_s(left_s, 10.0, num_before, num_places) == pytest.approx(expected_s)
