"""Costs as they are learned from timings: robust to single outliers, quick to follow a change, rising with rows."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.engine_cost import WIDTHS, CostModel, EngineCost
from core.costs.pass_cost import BRANCH_PASSES, EXTRAPOLATION, NUM_RECENT, Curve, PassCost
from core.records import Timing

ROWS = (1, 4, 16, 48)


def law(rows):
    return 0.003 * max(1.0, rows / 64.0)


def learned(num=40, factor=1.0):
    cost = PassCost(0.02)
    for index in range(num):
        rows = ROWS[index % len(ROWS)]
        cost.observe(rows, factor * law(rows))
    return cost


def test_one_slow_pass_of_a_width_is_not_believed_until_others_confirm_it():
    """Otherwise a first prompt pass of the size of a block would forbid guesses, and no later pass could correct it."""
    cost = PassCost(0.02)
    for _ in range(10):
        cost.observe(1, 0.004)
    cost.observe(9, 0.1)
    assert cost.curve()(9) == pytest.approx(9 * 0.004)
    for _ in range(2):
        cost.observe(9, 0.1)
    assert cost.curve()(9) == pytest.approx(0.1)


def test_the_profile_of_a_steady_engine_is_found():
    cost = learned()
    for rows in ROWS:
        assert cost.curve()(rows) == pytest.approx(law(rows), rel=0.02)


def test_one_pause_of_the_collector_changes_nothing():
    cost = learned()
    before = cost.points()
    cost.observe(16, 0.3)
    cost.observe(4, 0.003)
    cost.observe(16, 0.25)
    assert cost.points() == pytest.approx(before)


@pytest.mark.parametrize("factor", [8.0, 0.2])
def test_a_change_of_pace_is_noticed_within_some_passes(factor):
    cost = learned()
    for _ in range(NUM_RECENT):
        for rows in ROWS:
            cost.observe(rows, factor * law(rows))
    for rows in ROWS:
        assert cost.curve()(rows) == pytest.approx(factor * law(rows), rel=0.02)


# Branches


def branched(num, branch_s, *, factor=1.0, noise=0.05, seed=1, cost=None):
    """A cost that has seen passes of 2 to 8 rows, 20 ms and 1 more each, with up to 3 branches."""
    random, cost = Random(seed), cost or PassCost(0.02)
    for _ in range(num):
        rows = random.randint(2, 8)
        branches = random.randint(0, min(3, rows - 2))
        straight_s = 0.02 + 0.001 * rows
        cost.observe(rows, factor * (straight_s + branch_s * branches) * random.uniform(1 - noise, 1 + noise), branches)
    return cost


def test_what_a_branch_adds_is_told_apart_from_what_rows_cost():
    cost = branched(300, 0.004)
    assert cost.branch_s == pytest.approx(0.004, rel=0.15)
    for rows in (2, 4, 8):
        assert cost.curve()(rows) == pytest.approx(0.02 + 0.001 * rows, rel=0.1), "of a pass without branches"


@pytest.mark.parametrize("seed", range(10))
def test_where_branches_cost_nothing_noise_does_not_make_them_dear(seed):
    assert branched(300, 0.0, noise=0.0, seed=seed).branch_s == pytest.approx(0.0, abs=1e-9)
    assert branched(300, 0.0, noise=0.1, seed=seed).branch_s < 0.0006


def test_rows_are_not_taken_for_branches():
    """Where unlike rows are kept as one, the wider passes have more branches, too."""
    cost, random = PassCost(0.02), Random(3)
    for index in range(300):
        rows, branches, seconds = ((17, 0, 0.020), (19, 3, 0.0245))[index % 2]
        cost.observe(rows, seconds * random.uniform(0.97, 1.03), branches)
    assert cost.branch_s == 0.0


def test_blocks_of_many_branches_do_not_carry_the_profile_away():
    """Where branches take more of a pass than rows do, and no pass of as many rows was without."""
    cost, random = PassCost(0.02), Random(4)
    for index in range(3000):
        branches = random.randint(6, 9)
        cost.observe(15, (0.029 + 0.005 * branches) * random.uniform(0.95, 1.05), branches)
        if index % 40 == 0:
            cost.observe(1, 0.026)
    assert cost.curve()(1) == pytest.approx(0.026, rel=0.1)
    assert cost.curve()(15) > 0.029, "rows are thought to take more than they do, never next to nothing"


def test_a_slower_engine_has_dearer_branches():
    cost = branched(300, 0.004)
    branched(600, 0.004, factor=2.0, cost=cost)
    assert cost.branch_s == pytest.approx(0.008, rel=0.2)


def test_what_branches_cost_is_forgotten_where_there_are_none_any_more():
    """So that they are tried again: whoever drafts no branches learns nothing about them."""
    cost = branched(300, 0.004)
    for _ in range(BRANCH_PASSES):
        cost.observe(4, 0.024)
    assert cost.branch_s == pytest.approx(0.004, rel=0.3)
    cost.observe(4, 0.024)
    assert cost.branch_s == 0.0
    assert cost.curve()(8) == pytest.approx(0.028, rel=0.1), "what was seen with branches is not taken for rows"
    cost.observe(4, 0.028, 1)
    assert cost.branch_s > 0.0


def test_an_engine_counts_the_branches_of_a_call_that_had_its_passes_alone():
    engine = EngineCost(0.02)
    for index in range(100):
        branches = index % 2
        engine.observe(Timing(0.0, 0.02 + 0.004 * branches + 1e-5 * (index % 7), 1, 4), 0.03, branches)
    assert engine.passes.branch_s == pytest.approx(0.004, rel=0.1)


# What was not seen


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 1.0)), min_size=1, max_size=30))
def test_more_rows_never_cost_less(seen):
    cost = PassCost(0.01)
    for rows, seconds in seen:
        cost.observe(rows, seconds)
    curve = cost.curve()
    costs = [curve(rows) for rows in (0.5, 1, 2, 3, 5, 8, 13, 50, 200, 900, 1500, 4000, 16000)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(costs))


def test_beyond_what_was_seen_hope_ends():
    flat = Curve((1.0, 16.0), (0.003, 0.003))
    assert flat(16 * EXTRAPOLATION) == pytest.approx(0.003)
    assert flat(160 * EXTRAPOLATION) == pytest.approx(10 * flat(16 * EXTRAPOLATION))
    rising = Curve((1.0, 3.0, 5.0), (0.003, 0.003, 0.007))
    assert rising(9) == pytest.approx(0.011), "on the line from the narrowest to the widest"


def test_narrower_passes_than_were_seen_are_believed_to_cost_less():
    """Or they would never be tried, where all were wide at first."""
    assert Curve((64.0,), (0.01,))(16) == pytest.approx(0.0025)
    assert Curve((8.0, 16.0), (0.01, 0.014))(4) == pytest.approx(0.008)
    assert Curve((8.0, 16.0), (0.01, 0.1))(4) == pytest.approx(0.005), "never less than nothing"


def test_a_draft_feeds_rows_while_they_cost_little():
    for pass_s, rows in ((lambda _: 0.003, WIDTHS[-1]), (lambda width: 0.001 * width, 1)):
        curve = Curve(WIDTHS, [pass_s(width) for width in WIDTHS])
        assert CostModel(curve, curve, 0.001, 0.001).rows_worth == rows


def test_what_rounds_cost_counts_all_that_share_a_pass():
    curve = Curve((1.0, 100.0), (0.001, 0.1))
    shared = CostModel(curve, curve, 0.002, 0.003, num_verifying=4.0, num_drafting=2.0, branch_s=0.001)
    assert shared.is_shared
    assert shared.verify_s(3) == pytest.approx(0.016 + 0.002)
    assert shared.verify_s(3, branches=2) == pytest.approx(0.016 + 0.008 + 0.002)
    assert shared.verify_times(3).tolist() == pytest.approx([shared.verify_s(num) for num in range(4)])
    assert shared.draft_s(8, 3) == pytest.approx(3 * 0.016 + 0.003)
    assert shared.plain_rate == pytest.approx(1 / 0.006)


@pytest.mark.parametrize(("num_passes", "round_ms"), [(3, 12.0), (5, 12.0), (6, 18.0), (8, 18.0), (30, 37.0)])
def test_sessions_in_turn_hide_drafts_behind_each_others_verification(num_passes, round_ms):
    """The setup of the simulation: four sessions; a verification takes 5 ms and 1 ms of way, a pass of the draft 1 ms
    and 1 ms of way."""
    flat, thin = Curve((1.0, 100.0), (0.005, 0.005)), Curve((1.0, 100.0), (0.001, 0.001))
    shared = CostModel(flat, thin, 0.001, 0.001, num_verifying=4.0, num_drafting=4.0)
    assert 1e3 * shared.turn_s(num_passes, 1, num_passes) == pytest.approx(round_ms)


def test_a_session_alone_drafts_and_then_verifies():
    curve = Curve((1.0, 100.0), (0.001, 0.1))
    alone = CostModel(curve, curve, 0.002, 0.003)
    assert alone.turn_s(3, 2, 4) == pytest.approx(alone.verify_s(3) + alone.draft_s(2, 4))


def test_what_is_shown_is_shown_at_few_and_always_the_same_rows():
    cost = learned()
    rows = [3, 5, 7, 11, 23, 40, 70, 71, 73, 90] * 8
    for each in rows:
        cost.observe(each, 0.001 * each)
    assert set(cost.points()) <= {2**power for power in range(11)}
    assert {4, 8, 16, 32, 64} <= set(cost.points())
    assert all(cost.points()[rows] == cost.curve()(rows) for rows in cost.points())


@pytest.mark.parametrize("bad", [(0, 0.1), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))])
def test_impossible_timings_are_not_learned_from(bad):
    cost = learned()
    before = cost.points()
    cost.observe(*bad)
    assert cost.points() == before


def test_what_many_sessions_tell_of_one_pass_counts_once():
    engine = EngineCost(0.01)
    for _ in range(10):
        engine.observe(Timing(0.0, 0.003, 1, 64), 0.004)
        engine.observe(Timing(0.0, 0.0031, 1, 64), 0.004)
    before = engine.passes.curve()(64)
    for _ in range(64):  # one pass with a pause in it, of 64 sessions
        engine.observe(Timing(0.0, 0.3, 1, 64), 0.301)
    assert engine.passes.curve()(64) == pytest.approx(before, rel=0.05)


def test_the_wire_is_what_is_neither_waiting_nor_computing():
    engine = EngineCost(0.01)
    for _ in range(9):
        engine.observe(Timing(0.002, 0.003, 1, 4), 0.006)
    assert engine.wire_s == pytest.approx(0.001)
    for _ in range(10):  # most have waited behind a prompt
        engine.observe(Timing(0.002, 0.003, 1, 4), 0.036)
    for _ in range(5):
        engine.observe(Timing(0.002, 0.003, 1, 4), 0.006)
    assert engine.wire_s == pytest.approx(0.001)
    for _ in range(20):  # all calls wait for one another
        engine.observe(Timing(0.002, 0.003, 1, 4), 0.036)
    assert engine.wire_s == pytest.approx(0.031)


def test_a_heads_time_is_not_the_price_of_the_first_guess():
    """Plain decoding does not ask the head, so only passes with guesses would have its time."""
    engine = EngineCost(0.01)
    for _ in range(20):
        engine.observe(Timing(0.0, 0.008, 1, 1), 0.009)
        engine.observe(Timing(0.0, 0.011, 1, 2, guessing_s=0.0025), 0.012)
    price_s = engine.passes.curve()(2) - engine.passes.curve()(1)
    assert price_s == pytest.approx(0.0005, rel=0.1)
    assert engine.wire_s == pytest.approx(0.001)


def test_a_heads_time_is_part_of_rounds_while_most_calls_ask_it():
    engine = EngineCost(0.01)
    assert engine.guessing_s == 0
    for _ in range(NUM_RECENT):
        engine.observe(Timing(0.0, 0.011, 1, 2, guessing_s=0.0025), 0.012)
    assert engine.guessing_s == 0.0025
    for _ in range(NUM_RECENT // 2 + 1):  # plain decoding, which does not ask it
        engine.observe(Timing(0.0, 0.008, 1, 1), 0.009)
    assert engine.guessing_s == 0


def test_a_heads_time_is_that_of_one_verdict_however_many_sessions_share_the_pass():
    curve = Curve((1.0, 100.0), (0.001, 0.1))
    without, with_head = (
        CostModel(curve, curve, 0.002, 0.003, num_verifying=4.0, num_drafting=4.0, guessing_s=guessing_s)
        for guessing_s in (0.0, 0.005)
    )
    assert with_head.verify_s(3) == pytest.approx(without.verify_s(3) + 0.005)
    assert with_head.plain_rate == pytest.approx(without.plain_rate), "plain decoding does not ask it"
    assert with_head.turn_s(3, 1, 3) > without.turn_s(3, 1, 3)


@pytest.mark.parametrize(
    "timing",
    [
        Timing(0.0, 1e6, 1, 8),
        Timing(1e6, 0.01, 1, 8),
        Timing(-5.0, 0.01, 1, 8),
        Timing(0.0, 0.01, 1, 8, guessing_s=1e6),
        Timing(0.0, 0.01, 1, 8, guessing_s=-1e6),
    ],
)
def test_an_engine_that_claims_what_cannot_be_is_not_believed(timing):
    engine = EngineCost(0.003)
    for _ in range(6):
        engine.observe(timing, 0.01)
    assert engine.passes.curve()(8) < 0.02


def test_what_was_not_called_for_tells_nothing_of_the_way_and_may_take_no_longer_than_the_time_since_the_last_answer():
    engine = EngineCost(0.01)
    for _ in range(20):
        engine.observe(Timing(0.0, 0.010, 1, 4), 0.012)
    wire_s, pass_s = engine.wire_s, engine.passes.curve()(4)
    for _ in range(20):
        engine.observe(Timing(0.0, 1e9, 1, 4), 0.010, is_call=False)
    assert (engine.wire_s, engine.passes.curve()(4)) == (wire_s, pass_s)
    for index in range(200):
        engine.observe(Timing(0.0, 0.020 + 1e-6 * index, 1, 4), 0.019, is_call=False)
    assert engine.wire_s == wire_s
    assert engine.passes.curve()(4) == pytest.approx(0.020, rel=0.05)
