"""The simulated half of `bench rounds`: which figures there are, and how goals are judged."""

from __future__ import annotations

import argparse

import pytest

from bench.rounds import rounds, simulated
from bench.rounds.simulated import CHAIN_GOALS, TREE_GOALS, add_arguments, measure
from simulation.report.comparison import Run


def arguments(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture(scope="module")
def results():
    return {each.name: each for each in measure(arguments("--texts", "2", "--text-tokens", "24"))}


@pytest.mark.ci
def test_every_goal_is_judged_at_both_temperatures(results):
    goals = {name: each.goal for name, each in results.items() if each.goal is not None}
    assert goals == {
        f"simulated T = {t:g}: {name}": goal
        for t in (0.0, 1.0)
        for name, goal in (
            ("blocks of 8 over sequential", CHAIN_GOALS[t]),
            ("blocks of 32 over sequential", TREE_GOALS[t]),
            ("blocks of 8, share of the formula", 0.95),
            ("blocks of 32, share of the formula", 0.95),
        )
    }


def test_hits_and_hidden_time_are_given_where_something_is_hidden(results):
    for name in ("blocks of 8", "blocks of 32", "static chains of 8"):
        for figure in ("hit rate", "draft time hidden"):
            assert 0 < results[f"simulated T = 1: {name}, {figure}"].value <= 1
    assert 1 < results["simulated T = 1: rejection, static chains of 8 in turn, tokens a round"].value <= 9
    assert not any("T = 0: rejection" in name for name in results)
    assert {"verify_ms", "pass_ms", "just_in_time_ms"} <= results[
        "simulated T = 0: blocks of 8, hit rate"
    ].settings.keys()


def test_a_ratio_is_of_what_one_stream_gets(results):
    fast = results["simulated T = 0: blocks of 8 over sequential"]
    assert fast.value == pytest.approx(
        fast.settings["tokens_per_s"] / fast.settings["sequential_tokens_per_s"], abs=2e-3
    )
    assert fast.met is (fast.value >= CHAIN_GOALS[0.0])
    in_turn = results["simulated T = 0: blocks of 8 over the same in turn"]
    assert in_turn.settings["tokens_per_s"] == fast.settings["tokens_per_s"]
    assert in_turn.value == pytest.approx(
        fast.settings["tokens_per_s"] / in_turn.settings["sequential_tokens_per_s"], abs=2e-3
    )
    assert all(each.settings.get("failed_streams", 0) == 0 for each in results.values())


def test_the_best_in_turn_is_looked_for_under_every_verification(monkeypatch):
    tried = []

    def remember(scenario):
        for found in simulated_sweep(scenario):
            tried.append((scenario.temperature, found))
            yield found

    simulated_sweep = simulated.sweep
    monkeypatch.setattr(simulated, "sweep", remember)
    results = measure(arguments("--texts", "1", "--text-tokens", "12"))
    for temperature in (0.0, 1.0):
        best = max((run for at, run in tried if at == temperature), key=lambda run: run.rate)
        name = f"simulated T = {temperature:g}: sequential over plain"
        against = next(each for each in results if each.name == name).settings["against"]
        assert against == f"{best.verification.value}, gamma {best.gamma}"
    assert len({run.verification for at, run in tried if at == 1.0}) == 3
    assert all(isinstance(run, Run) for _, run in tried)


@pytest.mark.parametrize(("only", "parts"), [("simulated", "s"), ("paced", "p"), ("real", "r"), (None, "spr")])
def test_all_parts_but_one_may_be_left_out(monkeypatch, only, parts):
    asked = []
    for name, part in rounds.PARTS.items():
        monkeypatch.setattr(part, "measure", lambda args, name=name: asked.append(name[0]) or [])
    assert rounds.measure(argparse.Namespace(only=only)) == []
    assert "".join(asked) == parts
