"""Parts of control are taken out for a while, and then they are there again."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest

from bench.control import ablation
from simulation.scenario import Closed, Scenario


@pytest.mark.parametrize("part", ablation.PARTS)
def test_each_part_is_one_that_there_is_and_comes_back(part):
    before = [getattr(where, name) for where, name, _ in ablation.PARTS[part]]
    with ExitStack() as stack:
        for where, name, other in ablation.PARTS[part]:
            stack.enter_context(patch.object(where, name, other))
            assert getattr(where, name) != before
    assert [getattr(where, name) for where, name, _ in ablation.PARTS[part]] == before


def load():
    scenario = Scenario(load=Closed(1, 2), max_tokens=40)
    return ablation._case("one stream", scenario)


@pytest.mark.ci
def test_a_part_that_matters_is_worth_something():
    """And what was measured before is measured again when it is back."""
    whole, again = (ablation._rates([load()], "") for _ in range(2))
    assert whole == again
    without = ablation._rates([load()], "rows by what a pass costs")
    assert without != whole
    assert ablation._rates([load()], "") == whole


def test_the_worth_of_a_part_is_the_rate_with_it_over_the_rate_without():
    loads = [ablation._case(name, Scenario()) for name in ("a", "b")]
    found = ablation._worth("a part", loads, [2.0, 8.0], [1.0, 1.0])
    assert (found.name, found.value, found.unit) == ("ablation/a part", 4.0, "x")
    assert found.settings == {"median": 5.0, "most": "8.000 (b)", "least": "2.000 (a)"}


def test_loads_have_names_of_their_own():
    names = [case.name for case in ablation.cases()]
    assert len(set(names)) == len(names) > 20
