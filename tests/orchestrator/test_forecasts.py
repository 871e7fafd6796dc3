"""Forecasts by hand, and against completions that end as they were forecast."""

from __future__ import annotations

import pytest

from orchestrator.waits import PlaceTimes, until_free_s


@pytest.mark.parametrize(
    ("age_s", "num_tokens", "max_tokens", "expected_s"),
    [
        (0.0, 0, 100, 10.0),
        (2.0, 0, 100, 8.0),
        (12.0, 0, 100, 12.0),
        (2.0, 10, 100, 8.0),  # of 50 tokens, as usual
        (2.0, 10, 400, 38.0),  # of 200
        (2.0, 10, 20, 2.0),
        (2.0, 60, 100, 2.0 * 40 / 60),  # longer than usual, to its limit
        (2.0, 60, 110, 2.0 * 50 / 60),
        (3.0, 30, 30, 0.0),
    ],
)
def test_a_completion_goes_on_at_its_own_pace_to_its_usual_share_of_its_limit(
    age_s, num_tokens, max_tokens, expected_s
):
    times = PlaceTimes()
    times.ended(10.0, 50, 100)
    assert times.left_s(age_s, num_tokens, max_tokens) == pytest.approx(expected_s)


def test_one_that_may_fill_the_context_is_expected_to_be_as_long_as_others():
    times = PlaceTimes()
    for _ in range(50):
        times.ended(6.0, 300, 32_000)
        times.ended(0.5, 12, 12)
    assert times.left_s(1.0, 50, 32_000) == pytest.approx(5.0, rel=0.5)
    assert times.left_s(0.1, 3, 12) == pytest.approx(0.3)


def test_before_one_has_ended_its_limit_is_all_that_is_known():
    times = PlaceTimes()
    assert times.left_s(2.0, 4, 24) == pytest.approx(10.0)
    assert times.left_s(2.0, 0, 24) == pytest.approx(2.0)


def test_the_average_follows_the_recent_ones():
    times = PlaceTimes()
    for _ in range(100):
        times.ended(1.0, 5, 5)
    for _ in range(100):
        times.ended(5.0, 5, 5)
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
