"""Passes that wait: how long, by a clock made by hand."""

from __future__ import annotations

import pytest

from core.costs.pass_law import PassLaw
from workers.runtime.pacer import WAKE_UP_S, Pacer

LAW = PassLaw(((1, 0.010), (11, 0.020)))


class Clock:
    """Sleeps end late by as much as is said, and how long they were is remembered."""

    def __init__(self, late_s):
        self.now_s = 100.0
        self.late_s = late_s
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds + self.late_s

    def pacer(self):
        return Pacer("test", LAW, lambda: self.now_s, self.sleep)


@pytest.mark.parametrize("late_s", [1e-6, WAKE_UP_S / 2, WAKE_UP_S, 2 * WAKE_UP_S])
@pytest.mark.parametrize(("num_rows", "lasts_s"), [(1, 0.010), (6, 0.015)])
def test_a_pass_lasts_as_long_as_the_law_says_and_no_shorter(late_s, num_rows, lasts_s):
    clock = Clock(late_s)
    pacer, began_s = clock.pacer(), clock.now_s
    clock.now_s += 0.004  # what the pass took by itself
    pacer.wait(num_rows, began_s)
    assert lasts_s <= clock.now_s - began_s <= lasts_s + max(late_s, WAKE_UP_S) + 1e-9
    assert pacer.num_overruns == 0


def test_most_of_a_wait_is_one_sleep():
    clock = Clock(WAKE_UP_S)
    clock.pacer().wait(1, clock.now_s)
    assert len(clock.slept) <= 2
    assert clock.slept[0] == pytest.approx(0.010 - WAKE_UP_S)


def test_a_pass_that_took_longer_by_itself_does_not_wait_and_is_counted():
    clock = Clock(0.0)
    pacer, began_s = clock.pacer(), clock.now_s
    clock.now_s += 0.011
    pacer.wait(1, began_s)
    assert (pacer.num_overruns, clock.slept) == (1, [])
    assert (pacer.lasts_s(1, 0.011), pacer.lasts_s(1, 0.004)) == (0.011, 0.010)
