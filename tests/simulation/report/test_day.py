"""A day of load: replicas follow it, and do not flap."""

from __future__ import annotations

from itertools import pairwise

import pytest

from core import scaling
from core.config import Autoscaling, DraftScaling, OrchestratorScaling, TargetScaling
from simulation.report.day import DAY_S, ROLES, TICK_S, Day, Demand, Moment, Scaling, _Fleet, simulate_day

SETTINGS = Scaling(
    OrchestratorScaling(max_replicas=8, sessions=64),
    DraftScaling(max_replicas=16, min_replicas=0),
    TargetScaling(max_replicas=16, sessions=32),
)
STEADY = Demand(peak_sessions=200, night_share=1.0, noise=0.0, num_crowds=0)


def test_a_steady_load_changes_nothing_once_it_has_been_answered():
    day = simulate_day(STEADY, SETTINGS)
    settled = [moment for moment in day.moments if moment.at_s > 3600]
    assert {role: {moment.num_replicas[role] for moment in settled} for role in ROLES} == {
        "orchestrator": {4},  # 200 / 64
        "draft": {9},  # 200 * 0.03 / 0.7
        "target": {7},  # 200 / 32
    }


@pytest.mark.parametrize("seed", range(8))
def test_no_deployment_flaps_in_a_noisy_day(seed):
    day = simulate_day(Demand(peak_sessions=200, num_crowds=0), SETTINGS, seed=seed)
    assert {role: day.num_flaps(role) for role in ROLES} == dict.fromkeys(ROLES, 0)
    assert all(day.num_changes(role) > 4 for role in ROLES)


@pytest.mark.parametrize("seed", range(8))
def test_a_crowd_may_take_back_a_change_but_no_more(seed):
    day = simulate_day(Demand(peak_sessions=200, num_crowds=3), SETTINGS, seed=seed)
    assert all(day.num_flaps(role) <= 3 for role in ROLES)


def test_without_room_to_spare_targets_would_flap(monkeypatch):
    """So the day is noisy enough to show it."""
    monkeypatch.setattr(scaling, "SPARE_SHARE", 0.0)
    day = simulate_day(Demand(peak_sessions=200, num_crowds=0), SETTINGS)
    assert day.num_flaps("target") > 3


def test_replicas_follow_the_hours():
    day = simulate_day(Demand(peak_sessions=200, num_crowds=0), SETTINGS)
    at = {hour: day.moments[round(hour * 3600 / TICK_S)].num_replicas for hour in (4, 12, 23)}
    for role in ROLES:
        assert at[4][role] < at[12][role] > at[23][role]
        most = max(day.counts(role))
        assert day.replica_hours(role) < 0.85 * most * DAY_S / 3600


def test_a_night_without_sessions_has_no_drafts_but_a_target():
    day = simulate_day(Demand(peak_sessions=50, night_share=0.0, num_crowds=0), SETTINGS)
    assert min(day.counts("draft")) == 0
    assert min(day.counts("target")) == 1


def test_a_target_that_may_go_comes_back_with_the_first_session():
    scaled = Scaling(SETTINGS.orchestrator, SETTINGS.draft, TargetScaling(max_replicas=16, min_replicas=0))
    day = simulate_day(Demand(peak_sessions=50, night_share=0.0, num_crowds=0, noise=0.0), scaled)
    starts = [
        later.at_s for earlier, later in pairwise(day.moments) if later.num_sessions > 0 and earlier.num_sessions == 0
    ]
    ready = [moment.at_s for moment in day.moments if moment.num_replicas["target"] > 0]
    assert len(starts) == 1
    assert ready[0] - starts[0] <= 180 + 2 * TICK_S


def test_the_same_seed_is_the_same_day():
    demand = Demand(peak_sessions=100)
    assert simulate_day(demand, SETTINGS, seed=3) == simulate_day(demand, SETTINGS, seed=3)
    assert simulate_day(demand, SETTINGS, seed=3) != simulate_day(demand, SETTINGS, seed=4)


def test_flaps_and_shortage_are_counted():
    counts = [1, 2, 1, 1, 2]
    moments = [Moment(200.0 * index, 10, dict.fromkeys(ROLES, count), 5.0) for index, count in enumerate(counts)]
    day = Day(moments)
    assert day.num_changes("draft") == 3
    assert day.num_flaps("draft") == 2  # up and down within 200 s, down and up within 400 s
    assert day.short_share() == 0.5


def test_a_crowd_is_half_the_peak_for_ten_minutes():
    day = simulate_day(Demand(peak_sessions=200, night_share=1.0, noise=0.0, num_crowds=1), SETTINGS)
    assert [moment.num_sessions for moment in day.moments].count(300) == 600 / TICK_S
    assert {moment.num_sessions for moment in day.moments} == {200, 300}


def test_sessions_beyond_what_all_targets_hold_are_short():
    one = Scaling(SETTINGS.orchestrator, SETTINGS.draft, TargetScaling(max_replicas=1))
    day = simulate_day(STEADY, one)
    assert max(day.counts("target")) == 1
    assert day.short_share() == pytest.approx(150 / 200), "a session fills a fiftieth"


# One deployment: how many run, tick by tick, when so many are wanted


def running(wanted, loading_s=0.0, window_s=11.0, **settings):
    """Without delays and averages unless told to."""
    settings = {"max_replicas": 16, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0} | settings
    fleet, counts = _Fleet(Autoscaling(window_s=window_s, **settings), loading_s), []
    for tick, number in enumerate(wanted):
        fleet.step(tick * TICK_S, number, round)
        counts.append(fleet.num_running)
    return counts


def test_a_deployment_goes_by_the_average_of_its_window():
    assert running([0, 0, 0, 8, 8, 8, 8, 8], window_s=40.0) == [1, 1, 1, 1, 2, 4, 6, 8]


def test_more_are_started_when_they_were_wanted_for_long_enough_without_a_break_and_serve_once_loaded():
    wanted = [3, 3, 1, 3, 3, 3, *[3] * 10]
    first_s = 30 + 30 + 50
    assert running(wanted, loading_s=50.0, upscale_delay_s=30.0) == [
        1 if tick * TICK_S < first_s else 3 for tick in range(len(wanted))
    ]


def test_fewer_are_kept_when_they_were_wanted_for_long_enough():
    assert running([3, 3, 1, 1, 1, 1, 1, 1], downscale_delay_s=30.0) == [1, 3, 3, 3, 1, 1, 1, 1]


def test_those_that_still_load_go_first():
    assert running([2, 2, 4, 3, 3, 1, 1, 1, 1], loading_s=20.0) == [1, 1, 2, 2, 3, 1, 1, 1, 1]
    assert running([5, 1, 5, 5, 5, 5], loading_s=20.0) == [1, 1, 1, 1, 5, 5], "all of them, if so many are to go"


def test_the_first_is_started_at_once_and_stays_for_as_long_as_others_would():
    assert running([2] * 6, min_replicas=0, upscale_delay_s=30.0) == [0, 1, 1, 1, 1, 2]
    assert running([1, 0, 0, 0, 0, 0], min_replicas=0, downscale_delay_s=30.0) == [0, 1, 1, 0, 0, 0]


def test_there_are_never_more_or_fewer_than_the_settings_say():
    assert running([9, 9, 9, 0, 0], max_replicas=4, min_replicas=2) == [2, 4, 4, 2, 2]
