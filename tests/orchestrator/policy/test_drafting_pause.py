"""Drafting pauses where rounds without it make more tokens a second, and is tried again."""

from __future__ import annotations

import pytest

from core.config import SpeculationConfig
from core.records import Timing
from orchestrator.policy.drafting_pause import (
    MAX_WINDOWS,
    MIN_ROUNDS,
    PLAIN_ROUNDS,
    SETTLING_ROUNDS,
    WINDOW_ROUNDS,
    DraftingPause,
)
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.policies import Controller
from tests.orchestrator.policy.test_policies import chain, request, verdict


class FakeSessions:
    """All of them make `drafting` tokens a second while drafting goes on, and `plain` in a pause."""

    def __init__(self, drafting, plain, num=1, max_plain_rate=1e9):
        self.pause, self.num, self.max_plain_rate = DraftingPause(), num, max_plain_rate
        self.drafting, self.plain = drafting, plain
        self.num_drafted = 1
        """Tokens of a round with drafting."""
        self.ways = []
        self.reasons = []

    def round(self):
        rate = self.plain if self.pause.is_paused else self.drafting
        self.ways.append(self.pause.is_paused)
        num_tokens = 1 if self.pause.is_paused else self.num_drafted
        reason = self.pause.observe_round(num_tokens, num_tokens / rate, self.num, lambda: self.max_plain_rate)
        self.reasons += [reason] if reason else []

    def run(self, num_rounds):
        for _ in range(num_rounds):
            self.round()
        return self


def test_there_is_no_trial_while_drafting_makes_more_than_plain_decoding_ever_has():
    sessions = FakeSessions(drafting=20.0, plain=100.0, max_plain_rate=19.0).run(2000)
    assert not any(sessions.ways)


def test_the_first_trial_follows_the_first_window_and_decides():
    sessions = FakeSessions(drafting=20.0, plain=30.0)
    sessions.run(MIN_ROUNDS)
    assert sessions.ways == [False] * MIN_ROUNDS
    assert sessions.pause.is_paused  # the trial
    sessions.run(SETTLING_ROUNDS + MIN_ROUNDS)
    assert sessions.pause.is_paused
    assert sessions.reasons == ["sessions made 30.0 tokens/s without drafting, 20.0 with"]


def test_a_trial_that_gains_less_than_2_percent_ends():
    sessions = FakeSessions(drafting=20.0, plain=20.3).run(2 * MIN_ROUNDS + SETTLING_ROUNDS)
    assert not sessions.pause.is_paused
    assert not sessions.reasons


def test_trials_in_vain_become_rare():
    sessions = FakeSessions(drafting=30.0, plain=20.0).run(10_000)
    share = sum(sessions.ways) / len(sessions.ways)
    assert 0.0 < share < 1.5 / MAX_WINDOWS
    trials = sum(now and not before for before, now in zip(sessions.ways, sessions.ways[1:], strict=False))
    assert trials > 10_000 / MIN_ROUNDS / MAX_WINDOWS / 2  # but they go on


@pytest.mark.parametrize("num", [1, 16])
def test_trials_of_much_slower_rounds_take_little_of_the_time(num):
    """By the number of rounds they would take a third of it, and so with many sessions they did."""
    sessions = FakeSessions(drafting=10.0, plain=100.0, num=num).run(num * 20_000)
    sessions.ways.clear()  # while their number doubled
    sessions.run(num * 20_000)
    seconds = {
        way: sum(1.0 / (sessions.plain if way else sessions.drafting) for each in sessions.ways if each is way)
        for way in (True, False)
    }
    assert 0.0 < seconds[False] / seconds[True] < 2.0 / MAX_WINDOWS


def test_after_a_trial_that_changed_the_way_the_other_is_tried_again_after_one_window():
    """What a trial of that way takes is not known yet, and the first change may have been a mistake."""
    sessions = FakeSessions(drafting=20.0, plain=30.0)
    sessions.run(2 * MIN_ROUNDS + SETTLING_ROUNDS)
    assert sessions.reasons
    assert sessions.pause.is_paused
    sessions.run(MIN_ROUNDS)
    assert not sessions.pause.is_paused


def test_a_trial_of_many_sessions_does_not_keep_one_that_is_left_waiting():
    """Seconds are those of the clock, not of all sessions together."""
    sessions = FakeSessions(drafting=1.0, plain=10.0, num=16).run(16 * 8000)
    assert sessions.pause.is_paused
    sessions.num = 1
    sessions.ways.clear()
    longest_s = MAX_WINDOWS * (SETTLING_ROUNDS + WINDOW_ROUNDS) / sessions.drafting
    sessions.run(int(1.2 * longest_s * sessions.plain))
    assert not all(sessions.ways)


def test_drafting_comes_back_when_it_pays_again():
    sessions = FakeSessions(drafting=20.0, plain=30.0).run(500)
    assert sessions.pause.is_paused
    sessions.drafting = 60.0
    sessions.run((MAX_WINDOWS + 3) * MIN_ROUNDS)
    assert not sessions.pause.is_paused
    assert sessions.reasons[-1] == "sessions made 60.0 tokens/s with drafting, 30.0 without"


def test_what_is_under_way_at_a_change_is_not_measured():
    sessions = FakeSessions(drafting=20.0, plain=30.0, num=4)
    sessions.run(max(MIN_ROUNDS, 4 * WINDOW_ROUNDS))
    sessions.plain = 1.0
    sessions.run(4 * SETTLING_ROUNDS)
    sessions.plain = 30.0
    sessions.run(max(MIN_ROUNDS, 4 * WINDOW_ROUNDS))
    assert sessions.pause.is_paused


@pytest.mark.parametrize("num_after", [2, 32])
def test_rates_of_unlike_numbers_of_sessions_are_not_compared(num_after):
    sessions = FakeSessions(drafting=20.0, plain=30.0, num=8)
    sessions.run(8 * WINDOW_ROUNDS)
    assert sessions.pause.is_paused
    sessions.num = num_after
    sessions.run(8 * SETTLING_ROUNDS + max(MIN_ROUNDS, num_after * WINDOW_ROUNDS))
    assert not sessions.pause.is_paused  # the trial has ended
    assert not sessions.reasons


def test_a_few_long_rounds_beside_a_prompt_decide_nothing():
    sessions = FakeSessions(drafting=20.0, plain=19.0)
    sessions.run(3 * MIN_ROUNDS // 4)
    sessions.drafting = 1.0
    sessions.run(MIN_ROUNDS - 3 * MIN_ROUNDS // 4)
    assert sessions.pause.is_paused  # the trial
    sessions.drafting = 20.0
    sessions.run(SETTLING_ROUNDS + MIN_ROUNDS)
    assert not sessions.pause.is_paused
    assert not sessions.reasons


def test_tokens_of_one_way_do_not_count_for_the_other():
    sessions = FakeSessions(drafting=20.0, plain=18.0)
    sessions.num_drafted = 4
    sessions.run(MIN_ROUNDS)
    assert sessions.pause.is_paused  # the trial, of which each round has one token
    sessions.run(SETTLING_ROUNDS + MIN_ROUNDS)
    assert not sessions.pause.is_paused
    assert not sessions.reasons


def test_plain_rounds_are_measured_for_a_shorter_time():
    sessions = FakeSessions(drafting=20.0, plain=30.0, num=32)
    sessions.run(32 * WINDOW_ROUNDS)
    assert sessions.pause.is_paused
    assert not sessions.reasons
    sessions.run(32 * (SETTLING_ROUNDS + PLAIN_ROUNDS))
    assert sessions.reasons == ["sessions made 30.0 tokens/s without drafting, 20.0 with"]


# What the adaptive policy makes of it


def paused(**changes):
    policy = Controller(SpeculationConfig()).policy(request(**changes))
    policy.begin_drafting()
    for _ in range(10):
        policy.observe_round(verdict(chain(2), 1))
    for _ in range(MIN_ROUNDS):
        policy.observe_interval(1, 0.5)  # 2 tokens a second, where a pass takes 25 ms
    return policy


def test_a_paused_policy_ends_growth_and_neither_waits_nor_drafts_in_turn():
    policy = paused()
    assert policy.is_paused
    assert policy.tree_spec(100, 0) == CATCH_UP
    assert not policy.wants_turn()
    assert not policy.is_worth_waiting(0, has_drafted=False)
    assert policy.tree_spec(0, 0) is None  # the context of the draft is full


def test_a_paused_policy_decodes_as_plainly_as_one_without_a_draft():
    """Or a trial would find plain decoding slower than it is, by a message a step."""
    policy = paused(guessers=("draft",))
    policy._known.num_sessions += 1  # who shares passes goes on for no price
    assert policy.num_outcomes == 0
    assert policy.is_worth_a_plain_step(2)
    assert policy.may_offer
    policy._known.pause.is_paused = False
    assert not policy.is_worth_a_plain_step(2)
    assert not policy.may_offer


def test_the_report_says_when_drafting_pauses_and_continues():
    controller = Controller(SpeculationConfig())
    policy = controller.policy(request())
    policy.begin_drafting()
    rates = {False: 2.0, True: 8.0}
    for _ in range(2):
        before = controller.report().reason
        while controller.report().reason == before:
            policy.observe_interval(1, 1.0 / rates[policy.is_paused])
        report = controller.report()
        draws = (0, 0) if policy.is_paused else (policy.max_depth, policy.max_nodes)
        assert (report.draft_tokens, report.block_tokens) == draws
        assert report.reason.startswith(
            f"coupled: drafting {'pauses' if policy.is_paused else 'continues'}, sessions made"
        )
        rates = {False: 20.0, True: 8.0}


def test_rounds_of_a_pause_are_no_reason_to_give_the_draft_back():
    policy = paused(pipelining=False)
    for _ in range(200):
        policy.observe_round(verdict(chain(0), 0))
    assert not policy.wants_rest


def test_sessions_that_do_not_draft_are_not_counted():
    known = Controller(SpeculationConfig())
    for changes in ({"max_draft_tokens": 0}, {}):  # the second has no draft
        policy = known.policy(request(**changes))
        for _ in range(10 * MIN_ROUNDS):
            policy.observe_interval(1, 0.5)
        assert not policy.is_paused


def test_requests_without_guesses_do_not_lower_the_price_for_others():
    known = Controller(SpeculationConfig())
    drafting, plain = known.policy(request()), known.policy(request(max_draft_tokens=0))
    for _ in range(500):
        drafting.observe_interval(4, 0.03)
        plain.observe_interval(1, 0.03)
    assert drafting.rate == pytest.approx(4 / 0.03, rel=0.05)


def test_a_named_policy_does_not_pause():
    known = Controller(SpeculationConfig())
    adaptive, static = known.policy(request()), known.policy(request(policy="static"))
    adaptive.begin_drafting()
    for _ in range(2 * MIN_ROUNDS):
        adaptive.observe_interval(1, 0.5)
    assert adaptive.is_paused
    assert not static.is_paused


def test_the_fastest_pass_of_at_least_so_many_rows_bounds_plain_decoding():
    known = Controller(SpeculationConfig()).policy(request())._known
    for rows, seconds in ((1, 0.010), (4, 0.020), (8, 0.018), (8, 0.030)):
        known.verify.observe(Timing(0.0, seconds, 1, rows), seconds + 0.001)
    min_s = known.verify.passes.min_s
    assert [min_s(rows) for rows in (1, 2, 4, 8)] == [0.010, 0.018, 0.018, 0.018]
    assert min_s(100) == min_s(9) == 0.025  # nothing is known: what is expected
