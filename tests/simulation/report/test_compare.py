"""Three ways of decoding the same load, and presets that all can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import SpeculationConfig
from core.records import Verification
from core.rules import lossless
from core.speculation.calibration import miss_curve
from simulation.engines.agreement import rejection_acceptance, steady_law
from simulation.engines.hardware import PRESETS, large_target, small_draft
from simulation.engines.recorded import TraceLaw
from simulation.report.comparison import compare, plain, sequential
from simulation.scenario import Closed, Scenario, simulate

SMALL = Scenario(load=Closed(1, 4), max_tokens=40, speculation=SpeculationConfig(guessers=("draft",)))


@pytest.mark.thorough
def test_the_best_in_turn_is_the_best_of_all_that_was_tried():
    comparison = compare(replace(SMALL, temperature=1.0), gammas=(1, 3))
    trees_of_draws = {Verification.RECURSIVE_REJECTION, Verification.SEQUENTIAL_SELECTION}
    assert {run.verification for run in comparison.sequential} == set(lossless(is_greedy=False)) - trees_of_draws
    assert {run.gamma for run in comparison.sequential} == {1, 3}
    assert comparison.best_sequential.rate == max(run.rate for run in comparison.sequential)
    assert [run.name for run in comparison.runs] == ["plain", "sequential", "pipelined"]
    assert comparison.plain.report.tokens_per_round == 1.0
    assert comparison.pipelined.rate > comparison.best_sequential.rate > comparison.plain.rate


def test_greedy_decoding_has_one_verification():
    assert {run.verification for run in compare(SMALL, gammas=(2,)).sequential} == {Verification.COUPLED}


def test_a_sweep_ends_where_longer_drafts_do_not_pay():
    hard = replace(SMALL, law=steady_law(0.2, 0.0))
    assert len(compare(hard, gammas=(1, 2, 3, 4, 5, 6, 8)).sequential) < 5


def test_ways_differ_in_nothing_but_how_they_guess():
    assert plain(SMALL).num_drafts == 0
    fixed = sequential(SMALL, 3)
    assert (fixed.speculation.pipelining, fixed.speculation.max_draft_tokens) == (False, 3)
    assert replace(fixed, speculation=SMALL.speculation) == SMALL


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_decodes_faster_behind_verification_than_plainly(name):
    scenario = replace(SMALL, hardware=PRESETS[name])
    assert simulate(scenario).tokens_per_s_a_stream > 1.5 * simulate(plain(scenario)).tokens_per_s_a_stream


def test_the_large_pair_has_the_laws_that_it_is_named_for():
    """Verify 25 ms for a chain, 1.05x for a tree of 32; draft 3 ms up to 64 rows, in proportion beyond; hop 1 ms."""
    pair = PRESETS["70b+1b"]
    assert pair.target == large_target(0.025)
    assert pair.target.pass_s(1) == pair.target.pass_s(9) == 0.025
    assert pair.target.pass_s(33) == pytest.approx(1.05 * 0.025)
    assert pair.draft == small_draft(0.003)
    assert pair.draft.pass_s(1) == pair.draft.pass_s(64) == 0.003
    assert pair.draft.pass_s(128) == pytest.approx(0.006)
    assert pair.target_hop.round_trip_s == pair.draft_hop.round_trip_s == 0.001


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_law_from_one_number_is_like_what_was_recorded(temperature):
    """From the demo pair's own acceptance: chances of corrections, and acceptance by rejection, within 5 points."""
    recorded = TraceLaw.load(temperature)
    texts, tokens = recorded.columns["rank"].shape
    agreements = [recorded.at(text, token) for text in range(texts) for token in range(tokens)]
    acceptance = sum(each.rank == 0 for each in agreements) / len(agreements)
    law = steady_law(acceptance, temperature)
    for fanout in (1, 4, 16):
        measured = sum(each.rank <= fanout for each in agreements) / len(agreements)
        assert sum(law.shares[: fanout + 1]) == pytest.approx(measured, abs=0.05)
        assert sum(law.shares[: fanout + 1]) == pytest.approx(1 - (1 - acceptance) * miss_curve(fanout))
        plainly = sum(each.plain_rank < fanout for each in agreements) / len(agreements)
        assert sum(law.plain_shares[:fanout]) == pytest.approx(plainly, abs=0.07)
    assert law.alpha == pytest.approx(sum(each.alpha for each in agreements) / len(agreements), abs=0.02)


def test_rejection_accepts_no_less_than_coupling_and_no_more_than_theory_allows():
    for coupled in (0.0, 0.3, 0.7, 1.0):
        assert coupled <= rejection_acceptance(coupled) <= 2 * coupled / (1 + coupled)
