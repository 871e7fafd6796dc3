"""How far verdicts go down what is drafted in turn, as it is learned by depth."""

from __future__ import annotations

import pytest

from core.config import SpeculationConfig
from orchestrator.policy.adaptive import TRIAL_ROUNDS
from orchestrator.policy.depth_acceptance import DepthAcceptance
from orchestrator.policy.policies import Controller
from orchestrator.policy.shared_estimates import TRIAL_SHARE
from tests.orchestrator.policy.test_policies import chain, request, verdict


def test_before_anything_was_seen_each_guess_is_as_good_as_any_other():
    assert DepthAcceptance().path_prob(3, 0.5).tolist() == pytest.approx([0.5, 0.25, 0.125])


def test_a_step_is_learned_only_where_the_steps_before_it_were_made():
    acceptance = DepthAcceptance()
    for _ in range(400):
        acceptance.observe(num_accepted=1, num_passes=4, first_chance=0.7)
    first, second, third, fourth = acceptance.path_prob(4, 0.7)
    assert first > 0.95
    assert second / first < 0.1
    assert (third / second, fourth / third) == pytest.approx((0.7, 0.7)), "no verdict tells of them"


def test_a_block_that_was_accepted_whole_tells_nothing_of_what_was_not_drafted():
    acceptance = DepthAcceptance()
    for _ in range(400):
        acceptance.observe(num_accepted=2, num_passes=2, first_chance=0.7)
    path_prob = acceptance.path_prob(3, 0.7)
    assert path_prob[1] > 0.9
    assert path_prob[2] / path_prob[1] == pytest.approx(0.7)


def test_deeper_steps_follow_the_text_before_they_are_seen_again():
    acceptance = DepthAcceptance()
    for _ in range(400):
        acceptance.observe(num_accepted=4, num_passes=4, first_chance=0.7)
    easy, hard = acceptance.path_prob(4, 0.7)[-1], acceptance.path_prob(4, 0.2)[-1]
    assert hard < 0.7 * easy


# What the adaptive policy makes of it


def in_turn(**settings):
    return Controller(SpeculationConfig(pipelining=False, **settings)).policy(request())


def test_blocks_become_deeper_where_verdicts_go_far_although_first_candidates_are_often_wrong():
    policy = in_turn()
    policy._learned.accepted.value = 0.5
    before = policy._forecast()
    for _ in range(200):
        policy._learned.depth_acceptance.observe(num_accepted=8, num_passes=8, first_chance=0.5)
    assert before < policy._forecast() == policy.max_depth


def test_only_verdicts_on_what_was_drafted_count():
    policy = in_turn()
    policy.tree_spec(100, 64)
    before = policy._learned.depth_acceptance.path_prob(8, 0.5).tolist()
    policy.observe_round(verdict(chain(0), 0))  # the draft was late
    assert policy._learned.depth_acceptance.path_prob(8, 0.5).tolist() == before
    policy.observe_round(verdict(chain(2), 1))
    assert policy._learned.depth_acceptance.path_prob(8, 0.5).tolist() != before


def test_after_a_rest_a_session_tries_again_when_enough_rounds_have_been_made_without():
    policy = in_turn()
    policy._learned.accepted.value = 0.01
    policy.rest()
    assert not policy.wants_turn(), "no round of any session has paid for a trial"
    policy.tree_spec(100, 0)
    assert "where it is forecast to pay" in policy._known.reason
    for _ in range(int(TRIAL_ROUNDS / TRIAL_SHARE)):
        policy.observe_round(verdict(chain(0), 0))
    policy._learned.accepted.value = 0.01
    policy.rest()
    assert [policy.wants_turn() for _ in range(TRIAL_ROUNDS + 1)] == [True] * TRIAL_ROUNDS + [False]


def test_the_rest_of_a_pipelined_session_takes_no_trial_from_those_in_turn():
    policy = Controller(SpeculationConfig()).policy(request())
    policy._learned.untried_rounds = 1000
    policy.rest()
    assert policy._learned.untried_rounds == 1000


def test_trials_that_are_forecast_to_lose_cost_a_share_of_the_rounds_of_all_sessions():
    policy = in_turn()
    policy._learned.accepted.value = 0.01
    plain, *drafted = policy._rates_in_turn()
    between = TRIAL_ROUNDS * (1.0 - max(drafted) / plain) / TRIAL_SHARE
    assert between > 10
    trials = 0
    for _ in range(int(10 * between)):
        policy._learned.untried_rounds += 1
        trials += policy._may_try()
    assert trials in {9, 10}


def test_a_trial_that_is_forecast_to_gain_costs_nothing():
    policy = in_turn()
    policy._learned.accepted.value = 0.9
    assert policy._forecast() > 0
    assert policy._may_try()
    assert policy._may_try()
