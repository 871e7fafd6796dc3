"""The calibration chooses the draft that is grown to a cost ratio, by times that are written down here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.models import calibrate
from bench.models.sizes import read_shape
from deploy.settings import DEMO_DIRECTORY

TARGET, DRAFT = Path("target"), DEMO_DIRECTORY / "draft"


@pytest.mark.parametrize(
    ("narrow_layer_s", "wide_s", "cost_ratio", "num_layers", "is_wide"),
    [
        (0.0028, 0.011, 0.1, 5, False),
        (0.007, 0.0105, 0.1, 2, True),
        (0.007, 0.005, 0.1, 4, True),
        (0.007, 0.011, 0.03, 2, False),
    ],
)
def test_the_draft_is_the_one_that_comes_nearest(monkeypatch, narrow_layer_s, wide_s, cost_ratio, num_layers, is_wide):
    """A target of 100 ms, a draft of 2 ms; four times as wide it takes `wide_s` and 2.5 ms for each further layer."""
    shape = read_shape(DRAFT)
    grown = {}

    def cached(_source, wanted, _dtype, _directory):
        name = Path(f"{wanted.hidden_size}x{wanted.num_hidden_layers}")
        grown[name] = wanted
        return name

    def step_s(model, _dtype, **_):
        if model == TARGET:
            return 0.1
        wanted = grown[model]
        num_more = wanted.num_hidden_layers - 2
        is_narrow = wanted.hidden_size == shape.hidden_size
        return 0.002 + narrow_layer_s * num_more if is_narrow else wide_s + 0.0025 * num_more

    monkeypatch.setattr(calibrate, "cached", cached)
    monkeypatch.setattr(calibrate, "step_s", step_s)
    chosen = calibrate.draft_of_cost(DRAFT, TARGET, cost_ratio, "float32", Path())
    assert chosen.shape.num_hidden_layers == num_layers
    assert (chosen.shape.hidden_size == 4 * shape.hidden_size) == is_wide
