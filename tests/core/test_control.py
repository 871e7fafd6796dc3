"""When decisions change: not for noise, at once for a real gain, into rest on evidence, and back by trials."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from core.control import (
    CHANGE_GAIN,
    FIRST_PAUSE,
    MAX_PAUSE,
    REST_EVIDENCE,
    TRIAL_DRAFTS,
    TRIAL_TOKENS,
    Observation,
    State,
    decide,
    trial,
)
from core.planning import PLAIN, Forecast, Plan

FOUR, SIX = Plan(4, 8), Plan(6, 8)


def seen(best=1.5, current=None, plan=FOUR, num_tried=0, plain=1.0, is_pipelined=True):
    forecast = Forecast(plan if best > plain else PLAIN, max(best, plain), 1.0, 1.0)
    return Observation(plain, best if current is None else current, forecast, num_tried, is_pipelined)


def run(state, observations):
    """All decisions, and the last state."""
    decisions = []
    for observation in observations:
        decision, state = decide(observation, state)
        decisions.append(decision)
    return decisions, state


def changes(decisions):
    return [decision for decision in decisions if decision.is_change]


def test_noise_in_the_forecasts_does_not_make_it_flap():
    """Two plans that are equally good, each forecast a percent or so off, differently every time."""
    random, state = Random(1), State(plan=FOUR)
    noisy = [
        seen(best=1.5 * random.uniform(0.99, 1.01), current=1.5 * random.uniform(0.99, 1.01), plan=SIX)
        for _ in range(300)
    ]
    decisions, _ = run(state, noisy)
    assert changes(decisions) == []


def test_noise_about_the_worth_of_drafting_does_not_make_it_flap():
    random, state = Random(2), State(plan=FOUR)
    noisy = [seen(best=1.04 * random.uniform(0.985, 1.015), current=1.03) for _ in range(300)]
    decisions, _ = run(state, noisy)
    assert len(changes(decisions)) <= 2


def test_a_plan_that_promises_a_few_percent_more_is_taken_at_once():
    (decision,), state = run(State(plan=FOUR), [seen(best=1.5 * CHANGE_GAIN * 1.01, current=1.5, plan=SIX)])
    assert decision.plan == state.plan == SIX
    assert decision.is_change


def test_once_drafting_pays_again_the_next_rest_begins_with_a_short_pause():
    rested = State(plan=PLAIN, num_rested=5, pause=MAX_PAUSE)
    (decision,), state = run(rested, [seen(best=1.5)])
    assert decision.plan == FOUR
    assert (state.pause, state.num_rested) == (FIRST_PAUSE, 0)


def test_drafting_that_does_not_pay_is_given_up_on_evidence_and_not_before():
    decisions, state = run(State(plan=FOUR), [seen(best=0.97, current=0.97)] * REST_EVIDENCE)
    assert [decision.plan for decision in decisions] == [FOUR] * (REST_EVIDENCE - 1) + [PLAIN]
    assert state.plan == PLAIN


def test_evidence_has_to_come_in_a_row():
    speaks_for_rest, speaks_against = seen(best=0.97, current=0.97), seen(best=1.2, current=1.2)
    decisions, _ = run(State(plan=FOUR), [speaks_for_rest, speaks_for_rest, speaks_against] * 20)
    assert changes(decisions) == []


def test_a_plan_that_costs_much_more_than_plain_is_given_up_at_once():
    (decision,), _ = run(State(plan=FOUR), [seen(best=0.6, current=0.6)])
    assert decision.plan == PLAIN


def rests(num_decisions, answers=TRIAL_DRAFTS):
    """Decisions at rest, where each trial says that drafting does not pay; trials get so many answers at once."""
    state, decisions = State(plan=PLAIN), []
    for _ in range(num_decisions):
        decision, state = decide(seen(best=0.9, num_tried=answers if state.is_trial else 0), state)
        decisions.append((decision, state))
    return decisions


def test_at_rest_trials_are_short_and_their_pauses_grow():
    begins = [i for i, (decision, state) in enumerate(rests(800)) if decision.is_change and state.is_trial]
    pauses = [later - earlier for earlier, later in pairwise(begins)]
    assert begins[0] == FIRST_PAUSE - 1
    assert pauses == sorted(pauses)
    assert pauses[-1] <= MAX_PAUSE + 1
    assert pauses[-1] >= MAX_PAUSE > 4 * pauses[0] / 2
    assert all(decision.plan.depth <= TRIAL_TOKENS for decision, _ in rests(800))


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_trial_is_prepared_ahead_only_where_that_is_allowed(is_pipelined):
    plan = trial(is_pipelined=is_pipelined)
    assert plan.depth == TRIAL_TOKENS
    assert (plan.rows_per_pass > 0) is is_pipelined
    state = State(plan=PLAIN, num_rested=FIRST_PAUSE - 1)
    (decision,), _ = run(state, [seen(best=0.9, is_pipelined=is_pipelined)])
    assert decision.plan == plan


def test_a_trial_lasts_until_the_draft_has_answered():
    """A draft that is away teaches nothing, and its absence costs nothing."""
    state = State(plan=trial(is_pipelined=True), is_trial=True)
    decisions, state = run(state, [seen(best=0.9, num_tried=n) for n in range(TRIAL_DRAFTS)])
    assert changes(decisions) == []
    (decision,), state = run(state, [seen(best=0.9, num_tried=TRIAL_DRAFTS)])
    assert decision.plan == PLAIN
    assert not state.is_trial


def test_a_trial_that_pays_brings_drafting_back():
    state = State(plan=trial(is_pipelined=True), is_trial=True, pause=MAX_PAUSE)
    (decision,), state = run(state, [seen(best=1.4, num_tried=TRIAL_DRAFTS)])
    assert decision.plan == FOUR
    assert (state.is_trial, state.pause) == (False, FIRST_PAUSE)


def test_a_load_that_has_changed_brings_drafting_back_without_a_trial():
    (decision,), _ = run(State(plan=PLAIN), [seen(best=1.3)])
    assert decision.plan == FOUR


def test_decisions_are_pure():
    state = State(plan=FOUR, evidence=1)
    assert decide(seen(best=0.97), state) == decide(seen(best=0.97), state)
    assert state == State(plan=FOUR, evidence=1)


def test_every_change_says_why():
    decisions = [decision for decision, _ in rests(60)]
    before = PLAIN
    for decision in decisions:
        assert decision.is_change == (decision.plan != before)
        before = decision.plan
