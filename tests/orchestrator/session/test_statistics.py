"""Time hidden: each pair of overlapping calls is counted once, whichever ends first."""

from __future__ import annotations

import dataclasses

import pytest

from core.records import SpeculationStats
from orchestrator.session.statistics import NUM_RECENT, DraftWait, Statistics


@pytest.mark.parametrize("draft_ends_first", [True, False])
def test_the_hidden_part_of_drafting_is_its_overlap_with_verification(draft_ends_first):
    stats = Statistics()
    verify, draft = (10.0, 20.0), ((12.0, 18.0) if draft_ends_first else (12.0, 23.0))
    steps = [(stats.record_draft, draft), (stats.record_verify, verify)]
    for record, interval in steps if draft_ends_first else reversed(steps):
        record(*interval)
    assert stats.hidden_draft_time_s == (6.0 if draft_ends_first else 8.0)
    assert stats.draft_time_s == draft[1] - draft[0]


def test_a_pass_that_spans_two_verifications_is_hidden_by_both():
    stats = Statistics()
    stats.record_verify(0.0, 10.0)
    stats.record_draft(5.0, 15.0)
    stats.record_verify(10.0, 20.0)
    assert stats.hidden_draft_time_s == 10.0


def test_drafting_in_turn_hides_nothing():
    stats = Statistics()
    for start in range(0, 100, 10):
        stats.record_draft(start, start + 3)
        stats.record_verify(start + 3, start + 10)
    assert stats.hidden_draft_time_s == 0.0
    assert stats.draft_time_s == 30.0


def test_what_a_client_is_told_is_what_was_counted():
    stats = Statistics()
    names = {field.name for field in dataclasses.fields(SpeculationStats)} - {"accepted_per_position", "sources"}
    for number, name in enumerate(sorted(names)):
        setattr(stats, name, 10 + number)
    stats.accepted_per_position.update([0, 1, 0, 0])
    snapshot = stats.snapshot()
    assert {name: getattr(snapshot, name) for name in names} == {n: 10 + i for i, n in enumerate(sorted(names))}
    assert snapshot.accepted_per_position == (3, 1)


def test_a_stream_waits_for_the_part_of_drafting_that_nothing_hides():
    stats = Statistics()
    stats.record_verify(0.0, 10.0)
    stats.record_draft(7.0, 13.0)
    assert stats.draft_wait == DraftWait(3.0, 13.0)
    stats.record_verify(13.0, 20.0)
    assert stats.draft_wait == DraftWait(3.0, 20.0)


def test_waits_add_up_and_what_came_since_is_their_difference():
    assert DraftWait(1.0, 5.0) + DraftWait(2.0, 7.0) == DraftWait(3.0, 12.0)
    assert DraftWait(3.0, 12.0) - DraftWait(2.0, 7.0) == DraftWait(1.0, 5.0)


def test_a_long_verification_hides_each_of_several_short_drafts():
    stats = Statistics()
    for start in range(0, 2 * NUM_RECENT, 2):
        stats.record_draft(start, start + 1)
    stats.record_verify(0.0, 100.0)
    assert stats.hidden_draft_time_s == stats.draft_time_s == NUM_RECENT
