"""Scenarios whose figures can be worked out by hand: what the simulator measures is what must come of its laws of time.

A target pass takes 20 ms, a draft pass 2 ms, a hop 1 ms there and back, whatever the rows; prompts are of 8 tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import SpeculationConfig
from core.costs.pass_law import PassLaw
from core.records import Verification
from core.theory import expected_tokens, pipelined_factor
from simulation.engines.hardware import PRESETS, EngineLaw, Hardware, HopLaw
from simulation.engines.texts import Agreement, SteadyLaw
from simulation.report.comparison import plain, sequential
from simulation.scenario import Arrivals, Change, Closed, Scenario, simulate

TARGET_S, DRAFT_S, HOP_S = 0.020, 0.002, 0.001
VERIFY_S = TARGET_S + HOP_S
HARDWARE = Hardware(
    "by hand",
    EngineLaw(PassLaw.flat(TARGET_S, 10_000)),
    EngineLaw(PassLaw.flat(DRAFT_S, 10_000)),
    HopLaw(HOP_S),
    HopLaw(HOP_S),
)
INFALLIBLE = SteadyLaw((1.0,), (1.0,), alpha=1.0)
GAMMA, NUM_ROUNDS = 4, 10
NUM_TOKENS = 1 + NUM_ROUNDS * (GAMMA + 1)
HARD = SteadyLaw((0.30, 0.15, 0.10, 0.06, 0.04, 0.03), (0.25, 0.12, 0.08, 0.05), alpha=0.35)
BY_HAND = Scenario(
    hardware=HARDWARE,
    law=INFALLIBLE,
    load=Closed(1, 3),
    prompt_tokens=8,
    max_tokens=NUM_TOKENS,
    speculation=SpeculationConfig(policy="static", guessers=("draft",), max_draft_tokens=GAMMA, max_block_tokens=GAMMA),
)
LEASE_S = HOP_S
"""To the lease and back, once a stream."""


def test_an_infallible_draft_behind_verification_makes_each_round_cost_one_verification():
    """The draft grows on behind each verification, and is far ahead: but for the first pass all of it is hidden."""
    report = simulate(BY_HAND)
    assert (report.num_streams, report.num_failed, report.num_tokens) == (3, 0, 3 * NUM_TOKENS)
    assert report.num_rounds == 3 * NUM_ROUNDS
    assert report.tokens_per_round == GAMMA + 1
    assert report.tokens_per_s_a_stream == pytest.approx((GAMMA + 1) / VERIFY_S)
    assert report.formula_tokens_per_s == pytest.approx((GAMMA + 1) / VERIFY_S)
    assert (report.hit_rate, report.share_of_hits) == (1.0, 1.0)
    assert report.time_hidden > 0.97
    assert report.acceptance_rate == 1.0
    assert report.verify_s == pytest.approx(VERIFY_S)
    assert report.pass_s == pytest.approx(DRAFT_S), "of a pass"
    assert report.block_s == 0.0


def test_latencies_and_utilisation_are_those_of_the_calls():
    report = simulate(BY_HAND)
    first_s = LEASE_S + VERIFY_S
    whole_s = first_s + NUM_ROUNDS * VERIFY_S
    assert report.ttft_s.p50 == pytest.approx(first_s)
    assert report.ttft_s.p99 == pytest.approx(first_s)
    assert report.end_to_end_s.p95 == pytest.approx(whole_s)
    assert report.inter_token_s.p50 == 0.0, "four of five tokens come with the one before them"
    assert report.inter_token_s.p99 == pytest.approx(VERIFY_S)
    assert report.inter_token_s.mean == pytest.approx(VERIFY_S / (GAMMA + 1))
    assert report.elapsed_s == pytest.approx(3 * whole_s)
    assert report.tokens_per_s == pytest.approx(NUM_TOKENS / whole_s)
    assert report.target_utilisation == pytest.approx((NUM_ROUNDS + 1) * TARGET_S / whole_s)
    assert 0 < report.draft_utilisation < 1


def test_a_draft_that_takes_longer_than_verification_sets_the_pace():
    """One pass more than guesses: a round's five tokens take five, of which two are behind its verification."""
    slow = replace(HARDWARE, draft=EngineLaw(PassLaw.flat(0.010, 10_000)))
    report = simulate(replace(BY_HAND, hardware=slow))
    assert report.hit_rate > 0.9, "what follows a block is told while it is verified, but for the first"
    assert report.pass_s == pytest.approx(0.010), "of a pass"
    assert report.tokens_per_s_a_stream == pytest.approx((GAMMA + 1) / (5 * 0.010), rel=0.03)
    assert report.time_hidden == pytest.approx(VERIFY_S / (5 * 0.010), rel=0.25), "a pass is hidden in part"


def test_prefill_takes_its_time_and_is_counted_apart():
    """200 rows in one pass, in proportion beyond 64; rounds are not slower for it."""
    narrow = replace(HARDWARE, target=EngineLaw(PassLaw.flat(TARGET_S, 64)))
    report = simulate(replace(BY_HAND, hardware=narrow, prompt_tokens=200))
    assert report.ttft_s.p50 == pytest.approx(LEASE_S + TARGET_S * 200 / 64 + HOP_S)
    assert report.verify_s == pytest.approx(VERIFY_S)
    assert report.tokens_per_s_a_stream == pytest.approx((GAMMA + 1) / VERIFY_S)


def test_plain_decoding_makes_a_token_a_pass():
    """The target goes on by itself, and there is no way between a pass and the next."""
    report = simulate(plain(BY_HAND))
    assert report.tokens_per_s_a_stream == pytest.approx(1 / TARGET_S)
    assert report.tokens_per_round == 1.0
    assert (report.draft_utilisation, report.hit_rate, report.time_hidden) == (0.0, 0.0, 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("verification", "gamma"),
    [
        (Verification.COUPLED, 4),
        (Verification.REJECTION, 1),
        pytest.param(Verification.COUPLED, 1, marks=pytest.mark.ci),
        pytest.param(Verification.REJECTION, 4, marks=pytest.mark.ci),
    ],
)
def test_in_turn_is_theorem_3_8_with_the_wire(gamma, verification):
    """E(gamma) / (t_v + gamma t_d + two hops), within 2%."""
    alpha = 0.7
    law = SteadyLaw((alpha,), (alpha,), alpha=alpha)
    scenario = replace(BY_HAND, law=law, temperature=1.0, load=Closed(1, 8), max_tokens=500)
    report = simulate(replace(sequential(scenario, gamma), verification=verification))
    expected = expected_tokens(alpha, gamma) / (VERIFY_S + gamma * DRAFT_S + HOP_S)
    assert report.tokens_per_s_a_stream == pytest.approx(expected, rel=0.02)
    assert report.formula_tokens_per_s == pytest.approx(expected, rel=0.02)
    assert report.time_hidden == 0.0


@pytest.mark.ci
def test_pipelined_is_theory_where_the_draft_is_far_ahead():
    """E(gamma) / max(1, gamma c) of plain, within 2%: every second candidate is right where the first is not."""
    law, no_hop = SteadyLaw((0.8, 0.2), (0.8, 0.2), alpha=0.8), HopLaw(1e-6)
    near = replace(HARDWARE, target_hop=no_hop, draft_hop=no_hop)
    scenario = replace(BY_HAND, hardware=near, law=law, load=Closed(1, 8), max_tokens=200)
    report = simulate(scenario)
    expected = pipelined_factor(0.8, GAMMA, DRAFT_S / TARGET_S, report.hit_rate)
    assert report.hit_rate == 1.0
    assert report.tokens_per_s_a_stream * TARGET_S == pytest.approx(expected, rel=0.02)


class TwoOfFour:
    """Block verification accepts two guesses of each block, however long."""

    def at(self, seed, index, depth=0):
        return Agreement(rank=0, plain_rank=0, alpha=1.0, confidence=0.9)

    def num_accepted_of_block(self, seed, index, num_guesses):
        return min(2, num_guesses)


def test_block_verification_accepts_what_was_recorded_of_whole_blocks():
    scenario = replace(
        BY_HAND, law=TwoOfFour(), temperature=1.0, max_tokens=1 + 3 * 12, verification=Verification.BLOCK
    )
    report = simulate(scenario)
    assert report.tokens_per_round == 3.0
    assert report.hit_rate == 0.0, "what is drawn is drafted in turn"


def test_streams_that_share_a_target_share_its_passes():
    """Two at a time, of one length, fall into step: each pass verifies for both."""
    alone, both = simulate(plain(BY_HAND)), simulate(plain(replace(BY_HAND, load=Closed(2, 6))))
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s, rel=0.02)
    assert both.target_utilisation == pytest.approx(alone.target_utilisation, rel=0.02)


def test_arrivals_come_at_their_rate_and_not_after_their_time():
    quiet_then_busy = Arrivals(((10.0, 1.0), (5.0, 0.0), (10.0, 20.0)))
    report = simulate(plain(replace(BY_HAND, load=quiet_then_busy, max_tokens=2)))
    assert report.num_streams == pytest.approx(210, rel=0.15)
    assert report.elapsed_s < 26
    assert report.num_failed == 0


def test_an_engine_that_slows_down_slows_the_streams():
    usual = simulate(plain(BY_HAND))
    slowed = simulate(plain(replace(BY_HAND, changes=(Change(0.0, "target", 2.0),))))
    assert slowed.tokens_per_s_a_stream == pytest.approx(1 / (2 * TARGET_S))
    assert slowed.tokens_per_s_a_stream < usual.tokens_per_s_a_stream


def test_an_engine_slows_down_when_it_is_said_to():
    """In the eleventh of 51 passes; there is a way before the first and behind the last."""
    change = Change(LEASE_S + HOP_S + 10.5 * TARGET_S, "target", 2.0)
    report = simulate(plain(replace(BY_HAND, load=Closed(1, 1), max_tokens=51, changes=(change,))))
    assert report.elapsed_s == pytest.approx(LEASE_S + HOP_S + 51 * TARGET_S + 40 * TARGET_S)


@pytest.mark.ci
def test_a_target_far_away_costs_hardly_more_than_one_at_hand():
    """10 ms there and back, half a pass, for which it does not wait: it has what follows each verdict already."""
    adaptive = SpeculationConfig(guessers=("draft",), max_draft_tokens=GAMMA)
    near = replace(BY_HAND, load=Closed(1, 2), max_tokens=800, speculation=adaptive)
    far = replace(near, hardware=replace(HARDWARE, target_hop=HopLaw(TARGET_S / 2)))
    assert simulate(far).tokens_per_s_a_stream > 0.95 * simulate(near).tokens_per_s_a_stream


def test_a_draft_that_slows_down_slows_blocks_and_not_verification():
    report = simulate(replace(sequential(BY_HAND, GAMMA), changes=(Change(0.0, "draft", 3.0),)))
    assert report.block_s == pytest.approx(GAMMA * 3 * DRAFT_S + HOP_S, rel=0.02)
    assert report.verify_s == pytest.approx(VERIFY_S)


def test_another_seed_is_other_texts():
    scenario = replace(BY_HAND, law=SteadyLaw())
    assert simulate(replace(scenario, seed=1)).acceptance_rate != simulate(scenario).acceptance_rate


def test_the_same_scenario_gives_the_same_figures_and_another_seed_others():
    jittery = replace(HARDWARE, target_hop=HopLaw(HOP_S, jitter=0.5))
    scenario = replace(BY_HAND, hardware=jittery, law=SteadyLaw())
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario).elapsed_s != simulate(replace(scenario, seed=1)).elapsed_s


def test_what_the_process_did_before_changes_no_figure():
    """Nothing is remembered for the whole process."""
    scenario = Scenario(hardware=PRESETS["this-machine"], law=HARD, load=Closed(8, 8), prompt_tokens=24, max_tokens=24)
    first = simulate(scenario)
    assert simulate(scenario) == first


def test_without_shared_noise_a_draft_hits_less():
    law = SteadyLaw((0.8, 0.15), (0.4, 0.1))
    scenario = replace(BY_HAND, law=law, temperature=1.0)
    assert simulate(replace(scenario, has_noise=False)).hit_rate < simulate(scenario).hit_rate


def test_a_draft_at_hand_is_not_asked_again_and_again_for_nothing():
    """A prompt of one token is nothing to catch up with before the first question. It was asked for ever once."""
    at_hand = replace(HARDWARE, draft_hop=HopLaw(0.0))
    scenario = replace(sequential(BY_HAND, GAMMA), hardware=at_hand, prompt_tokens=1)
    assert simulate(scenario).num_tokens == 3 * NUM_TOKENS


def test_streams_with_an_engine_each_are_as_quick_as_one_alone():
    """Control learns from the engines that they are not shared, although the orchestrator has eight sessions: 0.93 of
    one alone, and 0.75 where it does not learn that.
    """
    speculation = SpeculationConfig(guessers=("draft",))
    alone = Scenario(
        hardware=PRESETS["this-machine"], load=Closed(1, 4), prompt_tokens=24, max_tokens=48, speculation=speculation
    )
    apart = replace(alone, load=Closed(8, 8), num_targets=8, num_drafts=8)
    assert simulate(apart).tokens_per_s_a_stream > 0.85 * simulate(alone).tokens_per_s_a_stream


def test_orchestrators_that_share_an_engine_know_of_each_others_streams():
    """Where rows cost they take as few as if one had all streams: 0.84 of what that one makes, since each learns
    of a quarter of the rounds, and 0.64 where they do not know of each other.
    """
    speculation = SpeculationConfig(guessers=("draft",))
    load = Closed(16, 16)
    one = Scenario(
        hardware=PRESETS["this-machine"], load=load, prompt_tokens=24, max_tokens=48, speculation=speculation
    )
    several = simulate(replace(one, num_orchestrators=4))
    assert several.num_failed == 0
    assert several.tokens_per_s_a_stream > 0.75 * simulate(one).tokens_per_s_a_stream
