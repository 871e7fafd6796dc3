from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Autoscaling, DraftScaling, OrchestratorScaling, TargetScaling
from core.errors import ConfigError
from core.scaling import (
    CROWDED_SHARE,
    DraftLoad,
    TargetLoad,
    drafts_wanted,
    orchestrators_wanted,
    targets_wanted,
    with_downscale_delay,
)

TARGET = TargetScaling(max_replicas=8, sessions=10, kv_use=0.8)
DRAFT = DraftScaling(max_replicas=8, min_replicas=0, busy=0.5, wait=0.1)


@pytest.mark.parametrize(
    ("num_replicas", "num_requests", "wanted"),
    [(1, 0, 0), (1, 1, 1), (1, 64, 1), (1, 65, 2), (1, 640, 10), (10, 65, 2), (2, 60, 2), (2, 50, 1)],
)
def test_orchestrators_follow_requests(num_replicas, num_requests, wanted):
    scaling = OrchestratorScaling(max_replicas=8, sessions=64)
    assert orchestrators_wanted(num_replicas, num_requests, scaling) == wanted


@pytest.mark.parametrize(
    ("num_replicas", "num_sessions", "kv_use", "wanted"),
    [
        (1, 10, 0.5, 1),
        (1, 11, 0.5, 2),
        (2, 0, 0.0, 0),
        (0, 1, 0.0, 1),
        (2, 4, 0.9, 3),  # few sessions with long contexts
        (4, 4, 0.2, 2),  # KV for one, but none to spare
        (4, 4, 0.15, 1),
        (3, 25, 0.8, 3),
        (3, 17, 0.1, 3),  # two would be full but for 15%
        (3, 15, 0.1, 2),
    ],
)
def test_targets_follow_whichever_asks_for_more(num_replicas, num_sessions, kv_use, wanted):
    assert targets_wanted(TargetLoad(num_replicas, num_sessions, kv_use), TARGET) == wanted


@pytest.mark.parametrize(
    ("num_replicas", "busy", "wait", "wanted"),
    [
        (1, 0.9, 0.0, 2),  # work for 1.8
        (2, 0.9, 0.0, 4),
        (2, 0.4, 0.05, 2),
        (2, 0.4, 0.5, 3),  # sessions wait, and the drafts are busy enough for another to help
        (2, 0.1, 0.5, 1),  # they wait for the model itself: more replicas would change nothing
        (4, 0.1, 0.0, 2),  # work for 0.8: one alone would be above CROWDED_SHARE
        (3, 0.0, 0.0, 1),
        (0, 0.0, 0.0, 1),
    ],
)
def test_drafts_follow_utilisation_and_waits(num_replicas, busy, wait, wanted):
    assert drafts_wanted(DraftLoad(num_replicas, 5, busy, wait), DRAFT) == wanted


def test_drafts_follow_leases_too_where_they_are_many():
    assert drafts_wanted(DraftLoad(1, 600, 0.0, 0.0), DRAFT) == 3  # 256 places each


def test_nobody_needs_a_draft_when_nobody_is_there():
    assert drafts_wanted(DraftLoad(3, 0, 0.9, 0.9), DRAFT) == 0


@given(work=st.floats(0.001, 20), wait=st.floats(0, 1), start=st.integers(1, 12))
def test_a_steady_load_is_answered_with_a_steady_count(work, wait, start):
    """`work` in replicas at full utilisation, shared by those there are; waits shrink as it spreads."""
    count, seen = start, []
    for _ in range(60):
        load = DraftLoad(count, 5, min(1.0, work / count), wait if work / count > CROWDED_SHARE * DRAFT.busy else 0.0)
        count = drafts_wanted(load, DRAFT)
        seen.append(count)
    assert len(set(seen[-20:])) == 1


@given(
    num_replicas=st.integers(1, 16), work=st.floats(0.0, 16), wait=st.floats(0, 1), more=st.floats(0, 1),
)  # fmt: skip
def test_more_work_or_more_waiting_never_wants_fewer(num_replicas, work, wait, more):
    def wanted(work: float, wait: float) -> int:
        return drafts_wanted(DraftLoad(num_replicas, 5, min(1.0, work / num_replicas), wait), DRAFT)

    assert wanted(work, wait) <= wanted(work + more, wait)
    assert wanted(work, wait) <= wanted(work, min(1.0, wait + more))


def test_less_is_had_only_after_a_while_without_more():
    recommendations, counts, count = [], [], 2
    for now_s, wanted in [(0, 2), (10, 5), (20, 1), (60, 3), (109, 1), (110, 1), (159, 1), (160, 1), (400, 0)]:
        recommendations, count = with_downscale_delay(recommendations, now_s, wanted, num_replicas=count, window_s=100)
        counts.append(count)
    assert counts == [2, 5, 5, 5, 5, 3, 3, 1, 0]


def test_a_wish_that_has_passed_starts_nothing():
    """Serve's delay must see whether more is still wanted."""
    recommendations, _ = with_downscale_delay([], 0.0, 5, num_replicas=2, window_s=100)
    assert with_downscale_delay(recommendations, 1.0, 1, num_replicas=2, window_s=100)[1] == 2


def test_without_a_memory_what_there_is_counts_as_wanted():
    recommendations, count = with_downscale_delay([], 50.0, 1, num_replicas=4, window_s=100)
    assert count == 4
    assert with_downscale_delay(recommendations, 149.0, 1, 4, 100)[1] == 4
    assert with_downscale_delay(recommendations, 151.0, 1, 4, 100)[1] == 1


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), min_size=1, max_size=60), st.floats(1, 100))
def test_what_is_remembered_is_all_that_matters(steps, window_s):
    """Against the plain definition over the whole history."""
    recommendations, now_s, history = [], 0.0, [(0.0, 4)]
    for pause_s, wanted in steps:
        now_s += pause_s
        history.append((now_s, wanted))
        recommendations, count = with_downscale_delay(recommendations or [(0.0, 4)], now_s, wanted, 4, window_s)
        most = max(each for at_s, each in history if now_s - at_s < window_s or at_s == now_s)
        assert count == max(wanted, min(4, most))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_replicas": 0}, "max_replicas must be at least 1, got 0"),
        ({"max_replicas": 2, "min_replicas": 3}, "max_replicas must be at least 3, got 2"),
        ({"max_replicas": 2, "min_replicas": -1}, "min_replicas must be at least 0, got -1"),
        ({"max_replicas": 2, "upscale_delay_s": -1}, "upscale_delay_s must be at least 0, got -1"),
        ({"max_replicas": 2, "window_s": 10}, "window_s must be above 10, got 10"),
    ],
)
def test_impossible_bounds_are_refused(settings, message):
    for kind in (Autoscaling, TargetScaling, DraftScaling):
        with pytest.raises(ConfigError) as caught:
            kind(**settings)
        assert str(caught.value) == message


def test_orchestrators_cannot_be_scaled_to_zero():
    with pytest.raises(ConfigError, match="min_replicas must be at least 1: orchestrators take the calls"):
        OrchestratorScaling(max_replicas=2, min_replicas=0)
