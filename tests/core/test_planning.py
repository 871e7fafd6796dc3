"""The best plan is the argmax of the formula that is promised: in turn, pipelined, and under a budget of rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.curve import Curve
from core.planning import (
    CHOSEN_WORTH,
    JITTER,
    PLAIN,
    SHARED_JITTER,
    Bounds,
    Economy,
    Plan,
    block_of,
    forecast,
    planned_table,
    table_budget,
)
from core.search import ROWS_PER_PASS, SEARCH_TABLES, Outlook, best_plan, just_in_time
from core.search import _neighbours as neighbours
from core.shapes import RankLaw, best_tree
from core.tables import prepared
from core.theory import expected_tokens, walltime_factor
from core.trees import num_branches

CHAINS = Bounds(8, 8, 256, 32, is_pipelined=False, is_chain=True)
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


@pytest.mark.parametrize("c", [0.02, 0.05, 0.12, 0.3, 0.6, 1.2])
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.75, 0.9])
def test_in_turn_gamma_is_the_argmax_of_leviathans_theorem(alpha, c):
    best = best_plan(steady(alpha), economy(draft_s=c * 0.025), CHAINS)
    gamma = max(range(CHAINS.max_depth + 1), key=lambda gamma: walltime_factor(alpha, gamma, c))
    assert best.plan.gamma == gamma
    assert best.rate * 0.025 == pytest.approx(walltime_factor(alpha, gamma, c))


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_the_wire_is_paid_once_a_call(gamma):
    costs = economy(wire_s=0.01)
    found = forecast(Plan(gamma, gamma), steady(0.8), costs, CHAINS)
    assert found.round_s == pytest.approx(0.025 + 0.01 + gamma * 0.003 + 0.01)
    assert found.tokens == pytest.approx(expected_tokens(0.8, gamma))


def test_sessions_that_share_engines_take_turns_in_halves():
    """Who drafts misses the pass of the others: so a round is two passes of half of them, not one and a wait."""
    found = forecast(Plan(4, 4), steady(0.8), real_economy(16.0), CHAINS)
    half = real_economy(8.0)
    assert found.round_s == pytest.approx(2 * max(half.verify_s(4), half.draft_s((1, 1, 1, 1))))


def all_plans(bounds):
    """Every plan on the grid that the search knows."""
    for nodes, passes, rows in product(range(1, bounds.max_block_tokens + 1), range(1, 6), ROWS_PER_PASS[:12]):
        depth = min(passes, bounds.max_depth)
        yield Plan(nodes, depth, passes, rows)


@pytest.mark.parametrize("sessions", [1.0, 4.0, 32.0])
@pytest.mark.parametrize("alpha", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("is_chain", [True, False])
def test_pipelined_the_plan_is_the_argmax_of_g(alpha, sessions, is_chain):
    """By brute force over everything that may be asked for; the search may end 3% below."""
    bounds = Bounds(4, 4 if is_chain else 8, 64, 8, is_pipelined=True, is_chain=is_chain)
    law, costs = steady(alpha), real_economy(sessions)
    found = best_plan(law, costs, bounds)
    tables = [forecast(plan, law, costs, bounds) for plan in all_plans(bounds)]
    with_jit = []
    for table in tables:
        jit = just_in_time(law, costs, bounds, table.rate)
        with_jit.append(
            forecast(replace(table.plan, jit_nodes=jit.block_nodes, jit_depth=jit.depth), law, costs, bounds)
        )
    in_turn = [forecast(Plan(n, d), law, costs, bounds) for n in range(9) for d in range(1, 5)]
    most = max(each.rate for each in (*tables, *with_jit, *in_turn))
    assert 0.97 * most <= found.rate <= most * 1.02
    assert found.rate == pytest.approx(forecast(found.plan, law, costs, bounds).rate)


def test_a_pipelined_round_is_the_longer_of_both_and_a_miss_adds_what_it_drafts():
    """G by hand: h E_hit + (1 - h) E_miss over h max(t_v, t_table) + (1 - h)(max(t_v, t_table) + t_jit)."""
    bounds = Bounds(2, 2, 64, 2, is_pipelined=True, is_chain=True)
    law, costs = steady(0.8), economy(wire_s=0.001)
    plan = Plan(2, 2, num_passes=3, rows_per_pass=4, jit_nodes=1, jit_depth=1)
    table = prepared((-1, 0), (0, 0), law, table_budget_of(plan, bounds))
    found = forecast(plan, law, costs, bounds)
    hit = table.hit_rate
    round_s = 0.026 + (1 - hit) * (0.003 + 0.001)
    assert found.round_s == pytest.approx(round_s)
    assert found.rate == pytest.approx((1 + table.accepted + (1 - hit) * 0.8) / round_s)
    slow = economy(draft_s=0.02, wire_s=0.001)
    assert forecast(plan, law, slow, bounds).round_s > 3 * 0.02


def table_budget_of(plan, bounds):
    """Of a plan whose rows the draft chooses."""
    budget = table_budget(plan, bounds, plan.depth)
    return replace(budget, rows_per_pass=int(CHOSEN_WORTH * budget.rows_per_pass))


@given(st.integers(1, 64), st.integers(1, 8))
def test_a_pass_has_the_rows_of_its_plan_at_most(rows, num_passes):
    """And is forecast to do what more would do where the draft chooses them, and just that where it samples."""
    bounds = Bounds(8, 8, 1024, 32, is_pipelined=True)
    plan = Plan(8, 8, num_passes, rows)
    table = planned_table(plan, bounds, steady(0.6))
    assert max(table.rows) <= rows
    assert table.hit_rate >= prepared_hits(plan, bounds, steady(0.6))
    sampled = RankLaw(((0.6, 0.2, 0.1),), bonus=(0.6, 0.2, 0.1))
    assert planned_table(plan, bounds, sampled).hit_rate == prepared_hits(plan, bounds, sampled)


@pytest.mark.thorough
def test_the_longer_of_two_times_that_jitter_is_clarks():
    """Against 200,000 draws of both; far apart it is the longer one."""
    random = Random(5)
    for costs, jitter in ((economy(), JITTER), (economy(sessions=4.0), SHARED_JITTER)):
        for verify_s, table_s in ((0.025, 0.025), (0.025, 0.023), (0.023, 0.025)):
            draws = [
                max(random.gauss(verify_s, jitter * verify_s), random.gauss(table_s, jitter * table_s))
                for _ in range(200_000)
            ]
            assert costs.longer_s(verify_s, table_s) == pytest.approx(sum(draws) / len(draws), rel=1e-3)
        assert costs.longer_s(0.025, 0.010) == pytest.approx(0.025)
        assert costs.longer_s(0.010, 0.025) == pytest.approx(0.025)


def test_a_draft_that_chooses_fills_its_passes_where_it_has_them_for_itself():
    """A table that lasts longer than verification, on a draft whose every row costs."""
    bounds, law, plan = Bounds(8, 8, 1024, 32, is_pipelined=True), steady(0.6), Plan(8, 4, 4, 16)
    sampled = RankLaw(law.chances, bonus=law.chances[0])
    costs = Economy(constant(1e-6), line(1e-6, 0.001), 0.0, 0.0)
    rows = planned_table(plan, bounds, law).rows
    assert min(rows) < max(rows)
    assert forecast(plan, law, costs, bounds).round_s == pytest.approx(0.001 * max(rows) * len(rows), rel=0.01)
    as_planned = forecast(plan, sampled, costs, bounds).round_s
    assert as_planned == pytest.approx(0.001 * sum(planned_table(plan, bounds, sampled).rows), rel=0.01)
    shared = replace(costs, num_verifying=2.0, num_drafting=2.0)
    assert forecast(plan, law, shared, bounds).round_s == pytest.approx(0.002 * sum(rows), rel=0.01)


def prepared_hits(plan, bounds, law):
    above = block_of(law, plan, bounds).growth
    return prepared(above.parents, above.ranks, law, table_budget(plan, bounds, plan.depth)).hit_rate


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_gamma_zero_is_a_candidate_and_wins_where_guesses_cannot_pay(is_pipelined):
    bounds = replace(CHAINS, is_pipelined=is_pipelined)
    steep = Economy(line(0.02, 0.01), constant(0.01), 0.001, 0.001, 16.0, 16.0)
    assert best_plan(steady(0.3), steep, bounds).plan == PLAIN
    assert best_plan(steady(0.3), steep, replace(bounds, max_depth=0)).plan == PLAIN


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 0.98), st.floats(0.002, 0.1), st.sampled_from([1.0, 3.0, 20.0]), st.booleans())
def test_no_plan_promises_less_than_plain_decoding(alpha, draft_s, sessions, is_pipelined):
    bounds = Bounds(4, 8, 64, 8, is_pipelined=is_pipelined)
    costs = economy(draft_s=draft_s, sessions=sessions)
    assert best_plan(steady(alpha), costs, bounds).rate >= forecast(PLAIN, steady(alpha), costs, bounds).rate


def test_the_search_is_bounded_at_a_time_and_goes_on_when_asked_again():
    """It shares a thread with all streams, so it must not hold it for long."""
    bounds = Bounds(8, 32, 256, 32, is_pipelined=True)
    law = RankLaw(((0.713, 0.11, 0.05, 0.021),))
    outlook = Outlook(law, real_economy(), bounds)
    rates = []
    while not outlook.is_settled:
        before = prepared.cache_info().misses
        rates.append(outlook.best().rate)
        assert prepared.cache_info().misses - before <= SEARCH_TABLES
    assert len(rates) > 1
    assert rates == sorted(rates)
    assert outlook.best().rate == pytest.approx(best_plan(law, real_economy(), bounds).rate)


# Branches


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_blocks_branch_where_branches_cost_nothing_and_go_straight_where_they_are_dear(is_pipelined):
    bounds = Bounds(8, 32, 256, 32, is_pipelined=is_pipelined)
    law = RankLaw(((0.6, 0.3, 0.05, 0.02),))
    free, dear = (best_plan(law, replace(real_economy(), branch_s=branch_s), bounds) for branch_s in (0.0, 0.02))
    assert not free.plan.is_chain
    assert free.plan.block_nodes > free.plan.gamma
    assert dear.plan.is_chain
    assert dear.plan.block_nodes <= dear.plan.depth
    assert replace(dear.plan, is_chain=False) in neighbours(dear.plan, real_economy(), bounds), (
        "when they are free again"
    )
    assert dear.rate < free.rate
    straight = best_plan(law, real_economy(), replace(bounds, is_chain=True))
    assert dear.rate == pytest.approx(straight.rate, rel=0.01)


def test_a_tree_costs_its_rows_and_its_branches():
    costs = replace(real_economy(2.0), branch_s=0.003)
    tree = best_tree(steady(0.5), 5, 2)
    assert tree.num_branches == num_branches(tree.growth.parents) == 2
    assert costs.verify_tree_s(tree) == pytest.approx(real_economy(2.0).verify_s(5) + 2 * 2 * 0.003)
    assert costs.block_price(40.0, 5.0, 5, 3) - costs.block_price(40.0, 5.0, 5) == pytest.approx(40 * 6 * 0.003)
    alone = replace(costs, num_verifying=1.0)
    assert alone.block_price(40.0, 5.0, 5, 3) - alone.block_price(40.0, 5.0, 5) == pytest.approx(40 * 3 * 0.003)


@given(st.integers(1, 40), st.integers(1, 6))
def test_branches_are_leaves_but_one(num_nodes, depth):
    tree = best_tree(steady(0.5), num_nodes, depth)
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    assert tree.num_branches == num_branches(tree.growth.parents) == len(leaves) - 1


def test_what_is_drafted_just_in_time_is_as_straight_as_the_plan():
    law, costs, bounds = steady(0.6), replace(real_economy(), branch_s=0.02), Bounds(8, 32, 256, 32, is_pipelined=True)
    jit = just_in_time(law, costs, bounds, 20.0, is_chain=True)
    assert jit.is_chain
    assert jit.block_nodes == jit.depth > 0


# The budget of rows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0.2, 0.99), min_size=1, max_size=4), min_size=2, max_size=3), st.floats(0.01, 0.9))
def test_one_price_for_all_sessions_is_greedy_by_survival_under_a_common_budget(sessions, price):
    """What sessions keep on their own, at the same price, is the best that anybody could fit into that many rows."""
    survival = []
    for alphas in sessions:
        reach, row = 1.0, []
        for alpha in alphas:
            reach *= alpha
            row.append(reach)
        survival.append(row)
    kept = [sum(1 for s in row if s > price) for row in survival]
    value = sum(sum(row[:n]) for row, n in zip(survival, kept, strict=True))
    choices = product(*(range(len(row) + 1) for row in survival))
    best = max(
        sum(sum(row[:n]) for row, n in zip(survival, choice, strict=True))
        for choice in choices
        if sum(choice) <= sum(kept)
    )
    assert value == pytest.approx(best)


def test_the_price_of_a_row_is_what_the_batch_could_have_made_in_its_time():
    costs = Economy(line(0.01, 0.001), constant(0.001), 0.0, 0.0, num_verifying=8.0)
    assert costs.price(rate=50.0, nodes=3.0) == pytest.approx(8 * 50.0 * 0.001, rel=0.01)
    assert economy(sessions=8.0).price(50.0, 3.0) == pytest.approx(0.0)
