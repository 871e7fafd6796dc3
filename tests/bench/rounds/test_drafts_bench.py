"""The benchmark of heads: what is compared with what, and that a head's guesses agree less the further they go."""

from __future__ import annotations

import argparse

import pytest

from bench.papers.noise import EAGLE, ONE_LAYER, TEMPERATURES, title
from bench.results import Result
from bench.rounds import drafts
from simulation.engines import HEAD_DEPTHS, HEAD_TEMPERATURES, Column, HeadLaw


def arguments(*argv):
    parser = argparse.ArgumentParser()
    drafts.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("temperature", HEAD_TEMPERATURES)
def test_recorded_guesses_agree_less_the_further_they_are_from_the_last_features(temperature):
    law = HeadLaw.load(temperature)
    right = [(each.columns[Column.RANK] == 0).mean() for each in law.by_depth]
    assert len(right) == HEAD_DEPTHS
    assert right[0] > right[3] > right[-1]
    at = [[law.at(0, index, depth).rank for index in range(40)] for depth in (0, 3, HEAD_DEPTHS - 1, HEAD_DEPTHS)]
    assert at[2] == at[3] != at[1] != at[0], "the last recording stands for all greater depths"


def test_a_goal_is_judged_at_each_temperature_by_tokens_a_round():
    settings = {"training_s": 9, "chain_of_6_costs": 0.5}
    found = [
        Result(title(temperature, name), value, "tokens", settings=settings)
        for temperature in TEMPERATURES
        for name, value in ((EAGLE, 2.4), (ONE_LAYER, 2.0 + temperature))
    ]
    results = drafts.over_equal_time({each.name: each for each in found})
    assert [(each.value, each.met) for each in results] == [(1.2, True), (0.889, False), (0.8, False)]


def test_simulated_heads_are_asked_in_every_way_and_judged_against_the_best_chain_in_turn(monkeypatch):
    monkeypatch.setattr(drafts, "NUM_TEXTS", 2)
    monkeypatch.setattr(drafts, "SIMULATED", ("70b+1b",))
    results = {each.name: each for each in drafts.measure(arguments("--only", "simulated"))}
    over = {name.partition(", ")[2]: each.value for name, each in results.items() if name.endswith("in turn")}
    for temperature in ("T = 0", "T = 0.8"):
        best = over[f"{temperature}: pipelined trees over the best chain in turn"]
        assert best > over[f"{temperature}: plain over the best chain in turn"] > 0
    assert sum(each.goal is not None for each in results.values()) == len(HEAD_TEMPERATURES)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_paced_head_on_a_draft_engine_changes_no_token():
    size = "--only paced --prompts 2 --tokens 24 --repeats 1"
    results = {each.name.partition(", T = ")[2]: each for each in drafts.measure(arguments(*size.split()))}
    assert results["0: completions unlike plain decoding"].met
    assert results["0.8: completions unlike plain decoding"].met
