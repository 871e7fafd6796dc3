"""The search for layers: by hand on a law of our own, within its budget, and as one reads it on the demo target."""

from __future__ import annotations

import json

import numpy as np
import pytest

from core.errors import ConfigError
from deploy.cli.main import main
from deploy.measure.agreement import Agreement
from deploy.measure.subsets import Candidate, check_budget, num_tried, removal
from deploy.settings import DEMO_DIRECTORY

WORTH = (9, 1, 5, 2, 7)


def agreement(alpha):
    return Agreement(np.array([1.0]), np.array([1.0]), np.array([alpha]))


def by_worth(layers):
    """A layer is worth the same beside any others."""
    return agreement(sum(WORTH[layer] for layer in layers) / sum(WORTH))


def test_the_layer_that_is_missed_least_goes_first():
    found = removal(5, 100, by_worth)
    assert [layers for layers, _ in found] == [(0, 2, 3, 4), (0, 2, 4), (0, 4), (0,)]
    assert [each.alpha for _, each in found] == pytest.approx([23 / 24, 21 / 24, 16 / 24, 9 / 24])


@pytest.mark.parametrize("budget", [8, 9, 12, 14, 100])
def test_a_small_budget_removes_several_at_once_and_is_kept(budget):
    tried = []
    found = removal(5, budget, lambda layers: tried.append(layers) or by_worth(layers))
    assert len(tried) <= budget
    assert [len(layers) for layers, _ in found] == [4, 3, 2, 1]
    assert found[-1][0] == (0,), "here the order is the same however many go at once"


def test_how_many_are_tried():
    assert num_tried(5, 1) == 5 + 4 + 3 + 2
    assert num_tried(5, 4) == 5 + 3
    assert num_tried(80, 80) == 80 + 78


@pytest.mark.parametrize(("num_layers", "budget"), [(5, 7), (1, 9)])
def test_a_budget_that_cannot_do_is_refused(num_layers, budget):
    with pytest.raises(ConfigError, match=r"--(budget|target)"):
        check_budget(num_layers, budget)


def test_the_prediction_is_that_of_the_closed_forms():
    half = Candidate((0,), agreement(0.8), 0.1, 8)
    factor, gamma = half.in_turn
    assert factor == pytest.approx((1 - 0.8 ** (gamma + 1)) / 0.2 / (gamma * 0.1 + 1))
    assert factor == pytest.approx(max((1 - 0.8 ** (each + 1)) / 0.2 / (each * 0.1 + 1) for each in range(9)))
    assert half.pipelined[0] > factor


@pytest.mark.thorough
def test_the_command_prints_a_line_for_each_size_and_the_settings_of_the_best(tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "layers.json"
    prompts.write_text("def read_lines(path):\nimport os, sys\n")
    argv = ["layers", "--target", str(DEMO_DIRECTORY / "target"), "--prompts", str(prompts), "--tokens", "12"]
    assert main([*argv, "--budget", "12", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    sizes = [int(line.split()[0]) for line in printed.splitlines()[1:6]]
    assert sizes == [5, 4, 3, 2, 1]
    results = json.loads(out.read_text())
    assert {result["name"] for result in results} == {"acceptance", "c", "factor in turn", "factor pipelined"}
    assert all(0 <= result["value"] <= 1 for result in results if result["name"] in ("acceptance", "c"))
    settings = f"--draft {DEMO_DIRECTORY / 'target'} --set 'draft.engine.layers="
    assert settings in printed or "no subset pays" in printed


@pytest.mark.thorough
def test_what_cannot_be_written_or_tried_is_refused_by_name_before_work_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deploy.measure.subsets.MeasuredModel", lambda _: pytest.fail("the weights have been loaded"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x\n")
    argv = ["layers", "--target", str(DEMO_DIRECTORY / "target"), "--prompts", str(prompts), "--tokens", "2"]
    assert main([*argv, "--json", str(tmp_path / "nowhere" / "a.json")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert main(["layers", "--target", "some/model", "--prompts", str(prompts)]) == 2
    assert "--target: there is no directory some/model, and nothing is downloaded here" in capsys.readouterr().err
    assert main([*argv, "--budget", "3"]) == 2
    assert "--budget 3 is too small for a model of 6 layers: give 10 or more" in capsys.readouterr().err
