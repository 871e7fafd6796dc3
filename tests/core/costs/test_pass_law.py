"""Laws of passes: between measured points, beyond them, and those that have a name."""

from __future__ import annotations

import pytest

from core.config import EngineConfig
from core.costs.pass_law import PASS_LAWS, PassLaw
from core.errors import ConfigError
from simulation.engines.hardware import PRESETS


def test_a_law_is_linear_between_its_points_and_in_proportion_beyond():
    law = PassLaw(((1, 0.01), (5, 0.02), (10, 0.02)))
    assert [law(rows) for rows in (1, 3, 5, 8, 10, 20)] == pytest.approx([0.01, 0.015, 0.02, 0.02, 0.02, 0.04])


def test_a_law_has_its_points_in_order():
    with pytest.raises(ValueError, match="in the order of their rows"):
        PassLaw(((5, 0.02), (1, 0.01)))


def test_named_laws_are_those_that_the_simulator_takes():
    pairs = {"70b+1b": ("70b", "1b"), "32b+0.6b": ("32b", "0.6b"), "8b+0.5b": ("8b", "0.5b")}
    for preset, (target, draft) in pairs.items():
        assert PRESETS[preset].target.pass_s is PASS_LAWS[target]
        assert PRESETS[preset].draft.pass_s is PASS_LAWS[draft]
    assert (PASS_LAWS["8b"](1), PASS_LAWS["0.5b"](1)) == (0.005, 0.001)


def test_an_engine_is_paced_by_a_name_that_there_is():
    assert EngineConfig("m").paced_as is None
    assert EngineConfig("m", paced_as="8b").paced_as == "8b"
    with pytest.raises(ConfigError, match=r"must be one of 70b, 32b, 8b, 1b, 0\.6b, 0\.5b, 123m, 13m, got 'h100'"):
        EngineConfig("m", paced_as="h100")
