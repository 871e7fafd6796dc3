"""Laws of time: between points, beyond them, and on the wire."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from simulation.engines.hardware import HopLaw, PassLaw


def test_a_pass_takes_what_was_measured_and_lies_on_a_line_between():
    law = PassLaw(((2, 1.0), (4, 2.0), (8, 10.0)))
    assert [law(rows) for rows in (1, 2, 3, 4, 5, 8, 16)] == [1.0, 1.0, 1.5, 2.0, 4.0, 10.0, 20.0]


@pytest.mark.parametrize("points", [(), ((4, 1.0), (2, 1.0)), ((1, -1.0),)])
def test_a_law_without_points_in_order_is_refused(points):
    with pytest.raises(ValueError, match="in the order of their rows"):
        PassLaw(points)


def test_jitter_comes_on_top_and_differs_from_hop_to_hop():
    random = Random(0)
    assert {HopLaw(2.0).one_way_s(random) for _ in range(10)} == {1.0}
    hops_s = [HopLaw(2.0, jitter=0.5).one_way_s(random) for _ in range(10_000)]
    assert min(hops_s) == pytest.approx(1.0, abs=0.01)
    assert fmean(hops_s) == pytest.approx(1.5, abs=0.02)
    assert max(hops_s) > 3.0
