"""Which draft is grown to a cost ratio, by times that are written down here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import calibrate
from bench.sizes import read_shape
from deploy.settings import DEMO_DIRECTORY

TARGET, DRAFT = Path("target"), DEMO_DIRECTORY / "draft"


@pytest.mark.parametrize(
    ("wide_s", "cost_ratio", "num_layers", "is_wide"),
    [(0.011, 0.1, 2, True), (0.005, 0.1, 4, True), (0.011, 0.03, 2, False)],
)
def test_the_draft_is_the_one_that_comes_nearest(monkeypatch, wide_s, cost_ratio, num_layers, is_wide):
    """A target of 100 ms, a draft of 2; four times as wide, two layers take `wide_s` and each more one 2.5 ms."""
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
        return 0.002 if wanted == shape else wide_s + 0.0025 * (wanted.num_hidden_layers - 2)

    monkeypatch.setattr(calibrate, "cached", cached)
    monkeypatch.setattr(calibrate, "step_s", step_s)
    chosen = calibrate.draft_of_cost(DRAFT, TARGET, cost_ratio, "float32", Path())
    assert chosen.shape.num_hidden_layers == num_layers
    assert (chosen.shape.hidden_size == 4 * shape.hidden_size) == is_wide
