"""The pace of a stream around a stop, on arrivals made by hand."""

from __future__ import annotations

import pytest

from bench.disruption.freeze import Pace
from bench.harness.traffic import Arrival


def ticks(start_s, end_s, step_s, num_guessed=0):
    """A token every `step_s`."""
    count = round((end_s - start_s) / step_s)
    return [Arrival(start_s + step_s * n, (7,), num_guessed) for n in range(count)]


def test_a_pace_that_never_breaks_has_settled_at_once():
    pace = Pace(ticks(0, 20, 0.1))
    assert pace.rate(5, 15) == pytest.approx(10, rel=0.02)
    assert pace.settled_s(5, 15, 9) == 0


def test_a_gap_delays_settling_by_its_length_but_for_what_the_pace_forgives():
    """One token in ten may miss from a window: it can begin a tenth of a second before the pause ends."""
    pace = Pace([*ticks(0, 5, 0.1), *ticks(7, 20, 0.1)])
    assert pace.settled_s(4.95, 15, 9.5) == pytest.approx(2.05, abs=0.06)


def test_a_pace_that_stays_low_never_settles():
    pace = Pace([*ticks(0, 5, 0.1), *ticks(5, 20, 0.3)])
    assert pace.settled_s(5, 15, 9) == 10


def test_drafting_is_back_with_the_first_guess_that_was_accepted():
    pace = Pace([*ticks(0, 5, 0.1, num_guessed=1), *ticks(5, 9, 0.1), *ticks(9, 12, 0.1, num_guessed=2)])
    assert pace.drafted_s(6) == pytest.approx(3)
    assert pace.drafted_s(20) is None
