"""Figures, judged and written."""

from __future__ import annotations

import json
import sys

import pytest

import bench.__main__ as program
from bench.results import Result, at_least, at_most, named, report, spread


def test_goals_are_reached_from_the_side_that_they_name():
    assert at_least(1.25, Result("a", 1.25, "x")).met is True
    assert at_least(1.25, Result("a", 1.24, "x")).met is False
    assert at_most(1.5, Result("a", 1.5, "x")).met is True
    assert at_most(1.5, Result("a", 1.51, "x")).met is False
    assert not at_least(1, Result("a", float("nan"), "x")).met
    assert not at_most(1, Result("a", float("nan"), "x")).met


def test_the_median_is_given_with_its_extent():
    result = spread("a", [3.0, 1.0, 2.0], "ms", gamma=4)
    assert (result.value, result.goal, result.met) == (2.0, None, None)
    assert result.settings == {"gamma": 4, "min": 1.0, "max": 3.0, "num_runs": 3}


def test_the_file_has_what_is_printed(tmp_path, capsys):
    results = [at_least(2, Result("fast", 1.5, "x")), Result("slow", 3, "ms", settings={"gamma": 4})]
    report(results, tmp_path / "results.json")
    assert "MISSED" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text()) == [
        {"name": "fast", "value": 1.5, "unit": "x", "goal": 2, "met": False, "settings": {}},
        {"name": "slow", "value": 3, "unit": "ms", "goal": None, "met": None, "settings": {"gamma": 4}},
    ]


def test_cases_are_chosen_by_a_part_of_their_name_and_none_is_an_error_that_names_them():
    assert named("text", ["hard text", "load", "texts"]) == ["hard text", "texts"]
    assert named("", {1: "one", 2: "two"}.items(), lambda item: item[1]) == [(1, "one"), (2, "two")]
    with pytest.raises(SystemExit, match="no name contains 'zzz'; there are: hard text, load"):
        named("zzz", ["hard text", "load"])


class Fake:
    """One line about it."""

    def __init__(self, results):
        self.results = results

    def add_arguments(self, parser):
        parser.add_argument("--size", default="1M")

    def measure(self, args):
        return [Result(args.size, 1, "x"), *self.results]


@pytest.mark.parametrize(("met", "status"), [(True, 0), (False, 1), (None, 0)])
def test_the_exit_status_says_whether_a_goal_was_missed(monkeypatch, capsys, met, status):
    monkeypatch.setattr(program, "BENCHMARKS", {"fake": "bench.fake"})
    monkeypatch.setitem(sys.modules, "bench.fake", Fake([Result("a", 1, "x", 1, met)]))
    assert program.main(["fake", "--size", "7M"]) == status
    assert "7M" in capsys.readouterr().out


@pytest.mark.parametrize("name", program.BENCHMARKS)
def test_every_benchmark_says_what_it_takes(name, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main([name, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out
