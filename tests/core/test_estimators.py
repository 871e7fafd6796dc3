"""Estimates of acceptance: they converge, follow a change, shrink to what is shared, and tell what they cannot know."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.estimators import (
    LEVEL_STEP,
    MAX_CHANCE,
    ConfidenceFit,
    Level,
    Placed,
    RankProfile,
    Rate,
    logistic,
    logit,
    miss_curve,
    placed,
    rounded_level,
)
from core.trees import ROOT, UNRANKED


def feed(rate, chance, num, random):
    for _ in range(num):
        rate.see(random.random() < chance)


def test_a_rate_converges_and_follows_a_change():
    random, rate = Random(1), Rate(0.7, weight=8.0, window=200.0)
    feed(rate, 0.9, 2000, random)
    assert rate.mean() == pytest.approx(0.9, abs=0.05)
    feed(rate, 0.3, 1000, random)
    assert rate.mean() == pytest.approx(0.3, abs=0.11)


def test_a_rate_of_which_little_was_seen_is_the_shared_prior():
    rate = Rate(0.7, weight=8.0)
    assert rate.mean() == 0.7
    assert rate.mean(0.2) == pytest.approx(0.2)
    rate.see(True)
    assert rate.mean(0.2) == pytest.approx((1 + 8 * 0.2) / 9)


@given(st.floats(0.006, 0.994))
def test_logistic_undoes_logit(chance):
    assert logistic(logit(chance)) == pytest.approx(chance)


# What a verdict says of each place


def test_a_verdict_is_read_place_by_place():
    """A block with two children at the root, one of which goes on; the path ends after it, in the table's second."""
    found = placed(parents=(ROOT, ROOT, 0), ranks=(0, 1, 0), path=(0,), rank=1, num_listed=3)
    assert found == [
        Placed(depth=1, taken=(0, 1), rank=0, num_known=2),
        Placed(depth=2, taken=(0,), rank=2, num_known=4),
    ]


def test_guesses_that_are_not_the_drafts_say_what_it_missed():
    parents, ranks = (ROOT, ROOT, 0, 0, 3), (0, UNRANKED, 0, UNRANKED, UNRANKED)
    found = placed(parents, ranks, path=(0, 3, 4), rank=None, num_listed=2)
    assert [(place.depth, place.taken, place.rank, place.num_known) for place in found] == [
        (1, (0,), 0, 1),
        (2, (0,), None, 3),
    ]


def test_what_no_list_says_is_not_known():
    """The token is none of the five candidates that the block or the table names."""
    (place,) = placed(parents=(ROOT, ROOT), ranks=(0, 2), path=(), rank=None, num_listed=3)
    assert place == Placed(depth=1, taken=(0, 2), rank=None, num_known=5)
    (place,) = placed(parents=(ROOT, ROOT), ranks=(0, 2), path=(), rank=None, num_listed=0)
    assert place.num_known == 1, "without a table rank 1 may have been it"
    (place,) = placed(parents=(), ranks=(), path=(), rank=None, num_listed=0)
    assert place.num_known == 0


TRUE_RANKS = (0.62, 0.2, 0.08, 0.04)


def draw_rank(random, chances=TRUE_RANKS):
    u = random.random()
    for rank, chance in enumerate(chances):
        u -= chance
        if u < 0:
            return rank
    return None


def test_a_profile_learns_the_law_of_ranks_from_lists_of_any_length():
    """A short list says nothing about the ranks beyond it, and must not count as if they had missed."""
    random, profile = Random(2), RankProfile(max_depth=4)
    for _ in range(4000):
        rank, num_known = draw_rank(random), random.choice((1, 2, 4, 9))
        profile.see(Placed(1, (0,), rank if rank is not None and rank < num_known else None, num_known))
    learned = profile.law().at(1)
    for rank, chance in enumerate(TRUE_RANKS):
        assert learned[rank] == pytest.approx(chance, abs=0.04), rank
    assert sum(learned) <= 1 + 1e-9


def test_before_anything_is_seen_corrections_follow_the_miss_curve():
    ranks = RankProfile(max_depth=2).law().at(1)
    for fanout in (1, 4, 16):
        assert 1 - sum(ranks[1 : fanout + 1]) / (1 - ranks[0]) == pytest.approx(miss_curve(fanout), abs=0.01)


def test_deep_places_that_few_have_seen_are_like_those_before_them():
    profile = RankProfile(max_depth=6)
    for _ in range(400):
        profile.see(Placed(1, (0,), 0, 1))
        profile.see(Placed(2, (0,), None, 1))
    heads = profile.heads()
    assert heads[0] > 0.9
    assert heads[1] < 0.1
    assert heads[5] == pytest.approx(heads[1], abs=0.01)


def test_depths_have_chances_of_their_own():
    random, profile = Random(3), RankProfile(max_depth=3)
    for _ in range(2000):
        for depth, chance in ((1, 0.8), (2, 0.6), (3, 0.4)):
            profile.see(Placed(depth, (0,), 0 if random.random() < chance else None, 1))
    assert profile.heads() == pytest.approx((0.8, 0.6, 0.4), abs=0.06)


def test_a_law_holds_until_it_has_drifted_noticeably():
    random, profile = Random(4), RankProfile(max_depth=2)
    for _ in range(2000):
        profile.see(Placed(1, (0,), 0 if random.random() < 0.7 else None, 1))
    law = profile.law()
    profile.see(Placed(1, (0,), 0, 1))
    assert profile.law() is law, "else nothing that was planned for it could be used again"
    for _ in range(400):
        profile.see(Placed(1, (0,), None, 1))
    assert profile.law() is not law


# A session's own level


def seen_level(chance, num_rounds, heads, seed=5):
    random, level = Random(seed), Level()
    for _ in range(num_rounds):
        level.fade()
        level.see(1, random.random() < chance)
    level.estimate(heads)
    return level


def test_a_session_is_like_the_others_until_it_shows_otherwise():
    assert Level().estimate((0.7,)) == 0.0
    assert abs(seen_level(0.7, 60, (0.7,)).shift) < 0.5
    assert seen_level(0.7, 60, (0.7,)).rounded == 0.0


def test_an_easy_text_and_a_hard_one_are_told_apart():
    assert seen_level(0.95, 60, (0.7,)).rounded >= LEVEL_STEP
    assert seen_level(0.3, 60, (0.7,)).rounded <= -2 * LEVEL_STEP


def test_a_level_follows_a_text_that_changes():
    random, level = Random(6), Level()
    shifts = []
    for chance in (0.95, 0.3):
        for _ in range(60):
            level.fade()
            level.see(1, random.random() < chance)
        level.estimate((0.7,))
        shifts.append(level.shift)
    assert shifts[0] > 0.5
    assert shifts[1] < -0.5


@given(st.floats(-4, 4), st.floats(-4, 4))
def test_a_rounded_level_keeps_to_its_grid_and_near_the_level(level, before):
    grid = round(before / LEVEL_STEP) * LEVEL_STEP
    rounded = rounded_level(level, grid)
    assert rounded == pytest.approx(round(rounded / LEVEL_STEP) * LEVEL_STEP)
    assert abs(rounded - level) <= 0.7 * LEVEL_STEP + 1e-9
    assert rounded_level(rounded + 0.2 * LEVEL_STEP, rounded) == rounded, "noise does not move it"


# Confidence


def chance_by(fit, expected, confidence):
    """What the line of a fit says of a guess that was made with this confidence."""
    intercept, slope = fit.line(expected)
    return min(logistic(intercept + slope * logit(confidence)), MAX_CHANCE)


def test_confidence_that_tells_is_made_use_of():
    random, fit = Random(7), ConfidenceFit()
    for _ in range(3000):
        confidence = random.choice((0.3, 0.6, 0.9))
        chance = logistic(logit(0.7) + 1.0 * (logit(confidence) - logit(0.6)))
        fit.see(0.7, confidence, random.random() < chance)
    for confidence in (0.3, 0.6, 0.9):
        expected = logistic(logit(0.7) + 1.0 * (logit(confidence) - logit(0.6)))
        assert chance_by(fit, 0.7, confidence) == pytest.approx(expected, abs=0.06)


def test_confidence_that_tells_nothing_leaves_the_expectation():
    random, fit = Random(8), ConfidenceFit()
    assert chance_by(fit, 0.7, 0.99) == pytest.approx(0.7)
    for _ in range(2000):
        fit.see(0.7, random.random(), random.random() < 0.7)
    for confidence in (0.2, 0.5, 0.8):
        assert chance_by(fit, 0.7, confidence) == pytest.approx(0.7, abs=0.07)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=60))
def test_whatever_is_seen_the_estimate_stays_a_chance_and_rises_with_confidence(seen):
    fit = ConfidenceFit()
    for expected, confidence, is_accepted in seen:
        fit.see(expected, confidence, is_accepted)
    chances = [chance_by(fit, 0.6, confidence) for confidence in (0.0, 0.2, 0.5, 0.9, 1.0)]
    assert all(0 < chance < 1 and math.isfinite(chance) for chance in chances)
    assert chances == sorted(chances)
