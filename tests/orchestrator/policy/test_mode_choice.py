"""The clock decides what sessions guess with, and what is tried costs little."""

from __future__ import annotations

import random

import pytest

from core.config import SpeculationConfig
from core.records import Timing
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.mode_choice import (
    MAX_WINDOWS,
    MIN_PLAIN_ROUNDS,
    MIN_ROUNDS,
    PLAIN_ROUNDS,
    SETTLING_ROUNDS,
    WINDOW_ROUNDS,
    MeasuredRound,
    Mode,
    ModeChoice,
)
from orchestrator.policy.policies import Controller
from tests.orchestrator.policy.test_policies import chain, request, verdict

PLAIN, GUESSERS, HEAD, DRAFT = Mode
WITH_DRAFT, WITH_ALL = frozenset({PLAIN, DRAFT}), frozenset({PLAIN, GUESSERS, DRAFT})


class FakeSessions:
    """Sessions whose rounds take what `seconds` says of their mode, on a clock of their own."""

    def __init__(self, *, modes=WITH_DRAFT, num=1, max_plain_rate=1e9, **tokens_per_s):
        """`tokens_per_s`: by the mode's name, in small letters."""
        self.choice, self.modes, self.num, self.max_plain_rate = ModeChoice(), modes, num, max_plain_rate
        self.rates = {Mode[name.upper()]: rate for name, rate in tokens_per_s.items()}
        self.num_drafted = 1
        """Tokens of a round with guesses; or a function that returns them."""
        self.elapsed_s, self.num_tokens = 0.0, 0
        self.ways, self.reasons = [], []

    @property
    def mode(self):
        return max(mode for mode in self.modes if mode <= self.choice.limit)

    def round(self):
        mode, num = self.mode, self.num_drafted
        num_tokens = 1 if mode is PLAIN else num() if callable(num) else num
        elapsed_s = (1 if mode is PLAIN else num if isinstance(num, int) else 3) / self.rates[mode]
        self.ways.append(mode)
        self.elapsed_s += elapsed_s / self.num
        self.num_tokens += num_tokens
        round_ = MeasuredRound(num_tokens, elapsed_s, is_alone=mode is PLAIN)
        reason = self.choice.observe_round(round_, self.num, self.modes, lambda: self.max_plain_rate)
        self.reasons += [reason] if reason else []

    def run(self, num_rounds):
        for _ in range(num_rounds):
            self.round()
        return self

    def request(self, num_tokens=200):
        """Tokens per second of one request."""
        began_s, end = self.elapsed_s, self.num_tokens + num_tokens
        while self.num_tokens < end:
            self.round()
        return num_tokens / (self.elapsed_s - began_s)


def three_of(seed):
    """Number of tokens of a round: three in the mean, and seldom three."""
    draw = random.Random(seed)
    return lambda: draw.choice([1, 1, 2, 3, 4, 7])


# Never slower


@pytest.mark.parametrize("share", [0.95, 0.9, 0.7, 0.5])
@pytest.mark.parametrize("modes", [WITH_DRAFT, WITH_ALL])
def test_guesses_that_lose_cost_at_most_3_percent_of_each_request_from_the_first_on(share, modes):
    sessions = FakeSessions(modes=modes, plain=1000.0, draft=share * 1000.0, guessers=share * 1000.0)
    sessions.max_plain_rate = 1200.0
    assert min(sessions.request() for _ in range(40)) >= 0.97 * 1000.0


@pytest.mark.parametrize("share", [0.95, 0.9, 0.7, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_guesses_that_lose_by_rounds_of_unlike_length_cost_as_much_in_the_mean(share, seed):
    sessions = FakeSessions(modes=WITH_ALL, plain=1000.0, draft=share * 1000.0, guessers=share * 1000.0)
    sessions.max_plain_rate, sessions.num_drafted = 1200.0, three_of(seed)
    rates = [sessions.request() for _ in range(40)]
    assert min(rates) >= 0.85 * 1000.0
    assert 40 / sum(1 / rate for rate in rates) >= 0.97 * 1000.0


def test_the_first_trial_of_plain_decoding_comes_as_soon_as_guesses_have_cost_more_than_two_tokens():
    sessions = FakeSessions(draft=500.0, plain=1000.0, max_plain_rate=1000.0).run(SETTLING_ROUNDS + 3)
    assert set(sessions.ways) == {DRAFT}
    sessions.run(SETTLING_ROUNDS + MIN_PLAIN_ROUNDS)
    assert set(sessions.ways[SETTLING_ROUNDS + 3 :]) == {PLAIN}
    assert sessions.reasons == ["sessions made 1000.0 tokens/s without guesses, 500.0 with drafting"]


@pytest.mark.parametrize(("gain", "least"), [(1.1, 0.99), (1.5, 1.4), (3.0, 2.8)])
@pytest.mark.parametrize("seed", range(5))
def test_guesses_that_gain_are_used(gain, least, seed):
    sessions = FakeSessions(plain=1000.0, draft=gain * 1000.0, max_plain_rate=1200.0)
    sessions.num_drafted = three_of(seed)
    sessions.request(4000)
    assert sessions.request(4000) >= least * 1000.0


def test_a_pair_that_changes_is_found_again():
    sessions = FakeSessions(plain=1000.0, draft=600.0, max_plain_rate=1200.0)
    for draft, best in ((600.0, 1000.0), (2500.0, 2500.0), (600.0, 1000.0)):
        sessions.rates[DRAFT] = draft
        sessions.request(40_000)
        assert sessions.request(2000) >= 0.97 * best, draft


def test_a_pair_that_loses_at_once_costs_no_more_than_a_few_tokens():
    """However long it has gained before."""
    sessions = FakeSessions(plain=1000.0, draft=1100.0, max_plain_rate=1200.0)
    sessions.request(20_000)
    sessions.rates[DRAFT] = 500.0
    assert sessions.request(400) >= 0.94 * 1000.0


def test_guessers_alone_are_used_where_they_alone_gain():
    sessions = FakeSessions(modes=WITH_ALL, plain=1000.0, guessers=1400.0, draft=700.0, max_plain_rate=1200.0)
    sessions.request(20_000)
    assert sessions.request(2000) >= 1350.0


def test_without_a_draft_guessers_are_compared_with_plain_decoding():
    sessions = FakeSessions(modes=frozenset({PLAIN, GUESSERS}), plain=1000.0, guessers=800.0, max_plain_rate=1200.0)
    sessions.request(400)
    assert sessions.mode is PLAIN
    sessions.rates[GUESSERS] = 1500.0
    sessions.request(20_000)
    assert sessions.mode is GUESSERS
    assert sessions.choice.limit is DRAFT, "a draft that comes is used"


# Trials


def test_there_is_no_trial_while_drafting_makes_more_than_plain_decoding_ever_has():
    sessions = FakeSessions(draft=20.0, plain=100.0, max_plain_rate=19.0).run(2000)
    assert set(sessions.ways) == {DRAFT}


def test_trials_in_vain_become_rare():
    sessions = FakeSessions(draft=30.0, plain=20.0, max_plain_rate=31.0).run(10_000)
    share = sessions.ways.count(PLAIN) / len(sessions.ways)
    assert 0.0 < share < 1.5 / MAX_WINDOWS
    trials = sum(now < before for before, now in zip(sessions.ways, sessions.ways[1:], strict=False))
    assert trials > 10_000 / MIN_ROUNDS / MAX_WINDOWS / 2  # but they go on


@pytest.mark.parametrize("num", [1, 8])
def test_trials_of_much_slower_rounds_take_little_of_the_time(num):
    """Counted in rounds they would take a third of it, as they did with many sessions."""
    sessions = FakeSessions(draft=10.0, plain=100.0, num=num).run(num * 20_000)
    sessions.ways.clear()  # while their number doubled
    sessions.run(num * 20_000)
    seconds = {way: sum(1.0 / sessions.rates[way] for each in sessions.ways if each is way) for way in WITH_DRAFT}
    assert 0.0 < seconds[DRAFT] / seconds[PLAIN] < 2.0 / MAX_WINDOWS


def test_a_trial_of_many_sessions_does_not_keep_one_that_is_left_waiting():
    """Seconds are those of the clock, not of all sessions together."""
    sessions = FakeSessions(draft=1.0, plain=10.0, num=16).run(16 * 8000)
    assert sessions.mode is PLAIN
    sessions.num = 1
    sessions.ways.clear()
    sessions.run(10 * MAX_WINDOWS * MIN_ROUNDS)
    assert set(sessions.ways) == {PLAIN, DRAFT}


def test_what_is_under_way_at_a_change_is_not_measured():
    sessions = FakeSessions(draft=20.0, plain=30.0, num=4, max_plain_rate=21.0)
    sessions.run(4 * (SETTLING_ROUNDS + WINDOW_ROUNDS))
    sessions.rates[PLAIN] = 1.0
    sessions.run(4 * SETTLING_ROUNDS)
    sessions.rates[PLAIN] = 30.0
    sessions.run(4 * PLAIN_ROUNDS)
    assert sessions.reasons == ["sessions made 30.0 tokens/s without guesses, 20.0 with drafting"]


def test_the_first_rounds_which_others_prompts_lengthen_are_not_measured():
    sessions = FakeSessions(draft=2.0, plain=20.0, num=8, max_plain_rate=21.0).run(8 * SETTLING_ROUNDS)
    sessions.rates[DRAFT] = 40.0
    sessions.run(8 * WINDOW_ROUNDS)
    assert set(sessions.ways) == {DRAFT}


def test_steps_that_were_offered_before_a_trial_of_guesses_do_not_count_for_it():
    sessions = FakeSessions(draft=500.0, plain=1000.0, max_plain_rate=1000.0)
    while not (sessions.mode is DRAFT and PLAIN in sessions.ways):
        sessions.round()
    for _ in range(100):
        offered = MeasuredRound(1, 1.0, is_alone=True)
        sessions.choice.observe_round(offered, 1, sessions.modes, lambda: 1000.0)
    assert sessions.mode is DRAFT
    sessions.run(SETTLING_ROUNDS + 4)
    assert sessions.mode is PLAIN


@pytest.mark.parametrize("num_after", [2, 32])
def test_rates_of_unlike_numbers_of_sessions_are_not_compared(num_after):
    sessions = FakeSessions(draft=20.0, plain=30.0, num=8, max_plain_rate=21.0)
    while sessions.mode is DRAFT:
        sessions.round()
    sessions.num = num_after
    sessions.run(8 * SETTLING_ROUNDS + max(MIN_PLAIN_ROUNDS, num_after * PLAIN_ROUNDS))
    assert sessions.mode is DRAFT  # the trial has ended
    assert not sessions.reasons


def test_a_few_long_rounds_beside_a_prompt_decide_nothing():
    sessions = FakeSessions(draft=20.0, plain=19.0, max_plain_rate=21.0)
    sessions.run(3 * MIN_ROUNDS // 4)
    sessions.rates[DRAFT] = 1.0
    sessions.run(MIN_ROUNDS // 8)
    sessions.rates[DRAFT] = 20.0
    sessions.run(MIN_ROUNDS // 8 + 2 * (SETTLING_ROUNDS + MIN_PLAIN_ROUNDS))
    assert not sessions.reasons


def test_tokens_of_one_way_do_not_count_for_the_other():
    sessions = FakeSessions(draft=20.0, plain=18.0, max_plain_rate=21.0)
    sessions.num_drafted = 4
    while sessions.mode is DRAFT:
        sessions.round()
    sessions.run(SETTLING_ROUNDS + MIN_PLAIN_ROUNDS)  # the trial, of which each round has one token
    assert sessions.mode is DRAFT
    assert not sessions.reasons


def test_a_draft_that_is_gone_for_all_does_not_keep_what_is_left_from_being_compared():
    sessions = FakeSessions(modes=WITH_ALL, draft=2000.0, guessers=700.0, plain=1000.0, max_plain_rate=1200.0).run(500)
    assert sessions.mode is DRAFT
    sessions.modes = frozenset({PLAIN, GUESSERS})
    sessions.run(500)
    assert sessions.mode is PLAIN


# What the adaptive policy makes of it


@pytest.mark.parametrize("others", [frozenset(), frozenset({DRAFT})], ids=["alone", "beside a draft"])
def test_a_head_that_loses_takes_no_other_guesser_with_it(others):
    modes = frozenset({PLAIN, GUESSERS, HEAD}) | others
    sessions = FakeSessions(modes=modes, plain=100.0, guessers=150.0, head=80.0, draft=70.0)
    sessions.num_drafted = 2
    assert sessions.run(100 * MIN_ROUNDS).mode is GUESSERS


def test_a_head_that_gains_guesses_beside_the_others():
    sessions = FakeSessions(modes=frozenset({PLAIN, GUESSERS, HEAD}), plain=100.0, guessers=120.0, head=150.0)
    sessions.num_drafted = 2
    assert sessions.run(40 * MIN_ROUNDS).mode is HEAD


@pytest.mark.parametrize(("has_head", "modes"), [(False, {PLAIN, GUESSERS}), (True, {PLAIN, GUESSERS, HEAD})])
def test_a_session_has_the_mode_of_a_head_if_the_target_has_one(has_head, modes):
    policy = Controller(SpeculationConfig()).policy(request(guessers=("head", "prompt_lookup")))
    if has_head:
        policy.expect_head(is_there=True)
    assert policy._modes == modes


@pytest.mark.parametrize(("limit", "has_nothing"), [(GUESSERS, True), (HEAD, False)])
def test_without_its_head_a_session_that_has_no_other_guesser_decodes_plainly(limit, has_nothing):
    policy = at(limit, guessers=("draft", "head"))
    policy.expect_head(is_there=True)
    assert policy.is_worth_a_plain_step(2) == has_nothing


def drafting(**changes):
    policy = Controller(SpeculationConfig()).policy(request(**changes))
    policy.begin_drafting()
    policy.observe_pass(Timing(0.0, 0.001, 1, 1))
    return policy


def at(limit, **changes):
    policy = drafting(**changes)
    for _ in range(10):
        policy.observe_round(verdict(chain(2), 1))
    policy._choice.limit = limit
    return policy


def test_a_policy_whose_rounds_are_slow_stops_drafting():
    policy = drafting()
    for _ in range(SETTLING_ROUNDS + 1):
        assert not policy.is_plain
        policy.observe_interval(MeasuredRound(1, 0.5))  # 2 tokens a second, where a pass takes 25 ms
    assert policy.is_plain


@pytest.mark.parametrize("limit", [PLAIN, GUESSERS])
def test_a_paused_policy_ends_growth_and_neither_waits_nor_drafts_in_turn(limit):
    policy = at(limit)
    assert policy.is_paused
    assert policy.tree_spec(100, 0) == CATCH_UP
    assert not policy.wants_turn()
    assert not policy.is_worth_waiting(0, has_drafted=False)
    assert policy.tree_spec(0, 0) is None  # the context of the draft is full


@pytest.mark.parametrize(("limit", "guessers"), [(GUESSERS, ("draft",)), (PLAIN, ("draft", "prompt_lookup"))])
def test_without_guesses_a_policy_decodes_as_plainly_as_one_without_a_draft(limit, guessers):
    """Or plain decoding would be found slower than it is, by a message a step."""
    policy = at(limit, guessers=guessers)
    policy._known.num_sessions += 1  # who shares passes goes on for no price
    assert policy.num_outcomes == 0
    assert policy.is_worth_a_plain_step(2)
    assert policy.may_offer
    policy._choice.limit = DRAFT
    assert not policy.is_worth_a_plain_step(2)
    assert not policy.may_offer


def test_each_kind_of_request_has_a_choice_of_its_own():
    known = Controller(SpeculationConfig())
    sampled, greedy = known.policy(request()), known.policy(request(temperature=0.0))
    sampled._choice.limit = PLAIN
    assert not greedy.is_paused
    assert known.policy(request()).is_plain


def test_the_report_says_when_drafting_pauses_and_continues():
    controller = Controller(SpeculationConfig())
    policy = controller.policy(request())
    policy.begin_drafting()
    policy.observe_pass(Timing(0.0, 0.001, 1, 1))
    rates = {False: 2.0, True: 8.0}
    for _ in range(2):
        before = controller.report().reason
        while controller.report().reason == before:
            policy.observe_interval(MeasuredRound(1, 1.0 / rates[policy.is_paused]))
        report = controller.report()
        draws = (0, 0) if policy.is_paused else (policy.max_depth, policy.max_nodes)
        assert (report.draft_tokens, report.block_tokens) == draws
        assert report.reason.startswith(
            f"coupled: drafting {'pauses' if policy.is_paused else 'continues'}, sessions made"
        )
        rates = {False: 20.0, True: 8.0}


def test_rounds_of_a_pause_are_no_reason_to_give_the_draft_back():
    policy = at(GUESSERS, pipelining=False)
    for _ in range(200):
        policy.observe_round(verdict(chain(0), 0))
    assert not policy.wants_rest


def test_sessions_that_may_not_guess_are_not_counted():
    policy = Controller(SpeculationConfig()).policy(request(max_draft_tokens=0))
    for _ in range(10 * MIN_ROUNDS):
        policy.observe_interval(MeasuredRound(1, 0.5))
    assert not policy.is_paused


def test_requests_without_guesses_do_not_lower_the_price_for_others():
    known = Controller(SpeculationConfig())
    drafting, plain = known.policy(request()), known.policy(request(max_draft_tokens=0))
    for _ in range(500):
        drafting.observe_interval(MeasuredRound(4, 0.03))
        plain.observe_interval(MeasuredRound(1, 0.03))
    assert drafting.rate == pytest.approx(4 / 0.03, rel=0.05)


def test_a_named_policy_does_not_pause():
    known = Controller(SpeculationConfig())
    adaptive, static = known.policy(request()), known.policy(request(policy="static"))
    adaptive._choice.limit = PLAIN
    assert adaptive.is_paused
    assert not static.is_paused
    assert not static.is_plain


def test_an_extra_draft_pauses_with_the_first():
    first, extra = drafting(), drafting()
    extra.follow(first)
    first._choice.limit = PLAIN
    assert extra.is_paused
    first._choice.limit = DRAFT
    for _ in range(10 * MIN_ROUNDS):
        extra.observe_interval(MeasuredRound(1, 0.5))
    assert not extra.is_paused, "each round counts once"


def test_the_fastest_pass_of_at_least_so_many_rows_bounds_plain_decoding():
    known = Controller(SpeculationConfig()).policy(request())._known
    for rows, seconds in ((1, 0.010), (4, 0.020), (8, 0.018), (8, 0.030)):
        known.verify.observe(Timing(0.0, seconds, 1, rows), seconds + 0.001)
    min_s = known.verify.passes.min_s
    assert [min_s(rows) for rows in (1, 2, 4, 8)] == [0.010, 0.018, 0.018, 0.018]
    assert min_s(100) == min_s(9) == 0.025  # nothing is known: what is expected
