"""The best plan is the argmax of the formula that is promised: in turn, and with a table of answers."""

from __future__ import annotations

import pytest

from core.curve import Curve
from core.economy import WIDTHS, Economy
from core.planning import PLAIN, Plan, best_plan, forecast, tables_near
from core.shapes import RankLaw
from core.tables import prepared
from core.theory import expected_tokens, walltime_factor

DEPTH = 8
ROWS = (1.0, 32.0, 64.0, 128.0, 1024.0)


def constant(seconds):
    return Curve((1.0, 1e9), (seconds, seconds))


def line(base_s, row_s):
    """A pass whose every row costs."""
    places = (1.0, 8.0, 64.0, 512.0)
    return Curve(places, [base_s + row_s * rows for rows in places])


def economy(verify_s=0.025, draft_s=0.003, wire_s=0.0, sessions=1.0):
    return Economy(constant(verify_s), constant(draft_s), wire_s, wire_s, sessions, sessions)


def real_economy(sessions=1.0):
    verify = Curve(ROWS, (0.025, 0.026, 0.0275, 0.04, 0.32))
    draft = Curve(ROWS, (0.003, 0.003, 0.003, 0.006, 0.048))
    return Economy(verify, draft, 0.001, 0.001, sessions, sessions)


def steady(alpha):
    rest = 1.0 - alpha
    return RankLaw(((alpha, 0.5 * rest, 0.2 * rest, 0.1 * rest, 0.05 * rest),))


def sampled(alpha):
    rest = 1.0 - alpha
    return RankLaw(((alpha, 0.4 * rest, 0.2 * rest),), bonus=(0.6, 0.2, 0.1))


@pytest.mark.parametrize("c", [0.02, 0.05, 0.12, 0.3, 0.6, 1.2])
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.75, 0.9])
def test_in_turn_gamma_is_the_argmax_of_leviathans_theorem(alpha, c):
    best = best_plan(steady(alpha), economy(draft_s=c * 0.025), DEPTH, 0)
    assert best.plan.depth == max(range(DEPTH + 1), key=lambda gamma: walltime_factor(alpha, gamma, c))
    assert best.rate * 0.025 == pytest.approx(walltime_factor(alpha, best.plan.depth, c))


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_the_wire_is_paid_once_a_call(gamma):
    found = forecast(Plan(gamma), steady(0.8), economy(wire_s=0.01))
    assert found.round_s == pytest.approx(0.025 + 0.01 + gamma * 0.003 + 0.01)
    assert found.tokens == pytest.approx(expected_tokens(0.8, gamma))


def test_sessions_that_share_engines_take_turns_in_halves():
    """Who drafts misses the pass of the others: so a round is two passes of half of them, not one and a wait."""
    found = forecast(Plan(4), steady(0.8), real_economy(16.0))
    half = real_economy(8.0)
    assert found.round_s == pytest.approx(2 * max(half.verify_s(4), half.draft_s((1, 1, 1, 1))))


@pytest.mark.parametrize("sessions", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("alpha", [0.4, 0.7, 0.9])
def test_who_climbs_comes_to_the_best_table(alpha, sessions):
    """By brute force over every depth and width: a step at a time ends within 3% of the best."""
    law, costs, tokens = sampled(alpha), real_economy(sessions), 64
    plan = PLAIN
    for _ in range(12):
        found = best_plan(law, costs, DEPTH, tokens, near=plan)
        plan = found.plan
    everything = [PLAIN, *(Plan(depth, rows) for depth in range(1, 9) for rows in (0, *WIDTHS))]
    most = max(forecast(plan, law, costs, tokens).rate for plan in everything)
    assert found.rate >= 0.97 * most


def test_a_round_with_a_table_is_the_longer_of_both_and_a_miss_adds_what_it_drafts():
    """By hand: [1 + accepted + (1 - h) E_jit] / [max(t_v, t_table) + (1 - h) t_jit]."""
    law, plan = sampled(0.8), Plan(2, 4)
    table = prepared(2, law, plan.table(64, 2))
    found = forecast(plan, law, economy(wire_s=0.001), 64)
    missed = 1 - table.hit_rate
    assert 0 < missed < 1
    assert len(table.rows) == 3, "one pass is lost below what is not fed yet"
    assert found.round_s == pytest.approx(0.026 + missed * 0.007)
    assert found.tokens == pytest.approx(1 + table.accepted + missed * (0.8 + 0.64))
    slow = forecast(plan, law, economy(draft_s=0.02, wire_s=0.001), 64)
    assert slow.round_s == pytest.approx(3 * 0.02 + 0.001 + missed * 0.041)


def test_who_shares_passes_goes_on_with_the_others_on_a_miss():
    law, plan = sampled(0.8), Plan(2, 4)
    table = prepared(2, law, plan.table(64, 2))
    found = forecast(plan, law, economy(sessions=4.0), 64)
    assert found.tokens == pytest.approx(1 + table.accepted)
    assert found.round_s == pytest.approx(0.025)


@pytest.mark.parametrize("table_tokens", [0, 64])
def test_gamma_zero_is_a_candidate_and_wins_where_guesses_cannot_pay(table_tokens):
    """Where every row costs as much as a pass, and drafting as much as verifying."""
    costs = Economy(line(0.02, 0.02), constant(0.02), 0.001, 0.001)
    assert best_plan(sampled(0.3), costs, DEPTH, table_tokens).plan == PLAIN
    assert best_plan(sampled(0.3), costs, 0, table_tokens).plan == PLAIN, "and where none are allowed"


def test_only_a_few_tables_are_made_at_a_time():
    """Each takes up to a millisecond, and who asks shares a thread with all streams."""
    for plan in (PLAIN, Plan(1, 1), Plan(5, 8), Plan(8, 64)):
        near = list(tables_near(plan, DEPTH, 64))
        assert 2 <= len(near) <= 5
        assert all(1 <= each.depth <= DEPTH and 1 <= each.rows_per_pass <= 64 for each in near)


def test_a_draft_feeds_more_rows_where_they_are_cheap():
    flat, dear = economy(), Economy(constant(0.025), line(0.0001, 0.001), 0.0, 0.0)
    assert flat.rows_worth() == WIDTHS[-1]
    assert dear.rows_worth() <= 4


def test_a_pass_that_others_use_meanwhile_costs_nothing():
    assert economy().pass_price(rate=100.0, rows=4) == pytest.approx(0.3)
    assert economy(sessions=4.0).pass_price(rate=100.0, rows=4) == 0.0


def test_a_tree_costs_its_rows_and_its_branches():
    costs = Economy(line(0.02, 0.001), constant(0.003), 0.001, 0.0, num_verifying=2.0, branch_s=0.0005)
    assert costs.verify_s(3, 2) == pytest.approx(0.02 + 0.001 * 8 + 0.0005 * 2 * 2 + 0.001)
