"""Comparisons of `bench control`, the range of its sweeps, and its report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.control import control
from bench.control.control import MODES, ControlCase, judged, static, sweep, trees
from simulation.scenario import Change, Closed, Scenario


def case(mode="greedy", *, is_pipelined=True):
    temperature, verification = MODES[mode]
    scenario = Scenario(
        temperature=temperature, verification=verification, load=Closed(1, 2), max_tokens=24, prompt_tokens=8
    )
    return ControlCase("stationary", f"short {mode}", scenario, is_pipelined)


@pytest.fixture
def asked(monkeypatch):
    """Settings that were simulated; each yields one token a second more for each node of its blocks, up to 8, and trees
    that are not deep yield little."""
    seen = []

    def run(_, speculation):
        seen.append(speculation)
        is_tree = speculation.policy == "static_tree"
        size = speculation.max_block_tokens if is_tree else speculation.max_draft_tokens
        is_flat = is_tree and speculation.max_draft_tokens < min(size, 8)
        return 10.0 + min(size, 8) - (5.0 if size > 8 else 0.0) - (4.0 if is_flat else 0.0), "why"

    monkeypatch.setattr(control, "_run", run)
    return seen


@pytest.mark.ci
def test_trees_and_chains_are_swept_and_simulated():
    swept = sweep(case())
    assert set(swept) == {"static", "path_probability", "static_tree"}
    chain, tree = swept["static"], swept["static_tree"]
    assert chain[8] > 1.3 * chain[0], "drafting pays there"
    assert tree["32 nodes, 8 deep"] > 1.05 * tree["4 nodes, 4 deep"]
    assert swept["path_probability"]["0.01"] != swept["path_probability"]["0.3"]


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_sizes_go_to_the_policies_and_rejection_verifies_no_trees(asked, is_pipelined):
    assert "static_tree" not in sweep(case("rejection", is_pipelined=is_pipelined))
    sweep(case("coupled", is_pipelined=is_pipelined))
    assert all(each.pipelining is is_pipelined for each in asked)
    found = {(each.max_block_tokens, each.max_draft_tokens) for each in asked if each.policy == "static_tree"}
    assert found == {(4, 4), (8, 4), (8, 8), (16, 4), (16, 8)}, "of 16 nodes, 13 tokens/s are too few to go on"
    assert {each.min_path_probability for each in asked if each.policy == "path_probability"} == {0.3, 0.1, 0.03, 0.01}


def test_a_load_that_is_over_before_it_changes_is_an_error():
    changing = replace(case().scenario, changes=(Change(60.0, "draft", 8.0),))
    with pytest.raises(RuntimeError, match=r"late was over after \d+\.\d s, before it had changed"):
        static(ControlCase("changing", "late", changing, is_pipelined=True), 2)


def test_a_sweep_of_trees_keeps_what_it_has_tried(asked):
    assert max(trees(case()).values()) == 18.0
    assert len(asked) == 5


def test_adaptive_control_is_judged_by_the_best_of_all_and_compared_with_each(asked, monkeypatch):
    monkeypatch.setattr(control, "adaptive", lambda _: (9.0, "why"))
    of_all, *apart = judged(case())
    assert (of_all.goal, of_all.met) == (0.97, False)
    assert of_all.value == pytest.approx(9.0 / 18.0)
    assert of_all.name.endswith(": adaptive over best static")
    assert of_all.settings["best_gamma"] == 8
    assert of_all.settings["static_tree_tokens_per_s"]["8 nodes, 8 deep"] == 18.0
    assert [each.goal for each in apart] == [None] * 3
    assert {each.name.split("over best ")[1]: each.settings["best"] for each in apart} == {
        "static chain": 8,
        "chain by the draft's chances": "0.3",
        "static tree": "8 nodes, 8 deep",
    }


def test_the_best_may_be_a_tree(monkeypatch):
    monkeypatch.setattr(control, "sweep", lambda _: {"static": {0: 10.0, 8: 20.0}, "static_tree": {"a tree": 30.0}})
    monkeypatch.setattr(control, "adaptive", lambda _: (27.0, "why"))
    of_all, over_chain, over_tree = judged(case())
    assert of_all.settings["best_static"] == "static_tree"
    assert [of_all.value, over_chain.value, over_tree.value] == [0.9, 1.35, 0.9]
