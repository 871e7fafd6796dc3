"""Time hidden: each pair of overlapping calls is counted once, whichever ends first."""

from __future__ import annotations

import pytest

from core.records import Call, CallTrace
from orchestrator.statistics import Statistics


@pytest.mark.parametrize("draft_ends_first", [True, False])
def test_the_hidden_part_of_drafting_is_its_overlap_with_verification(draft_ends_first):
    stats = Statistics()
    verify, draft = (10.0, 20.0), ((12.0, 18.0) if draft_ends_first else (12.0, 23.0))
    steps = [(stats.record_draft, draft), (stats.record_verify, verify)]
    for record, interval in steps if draft_ends_first else reversed(steps):
        record(*interval)
    assert stats.hidden_draft_time_s == (6.0 if draft_ends_first else 8.0)
    assert stats.draft_time_s == draft[1] - draft[0]


def test_a_table_that_spans_two_verifications_is_hidden_by_both():
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


def test_a_trace_counts_from_the_beginning_of_the_stream_and_is_given_once():
    stats = Statistics(began_s=100.0)
    stats.trace.append(CallTrace(Call.VERIFY, 101.0, 102.0, 4))
    (call,) = stats.take_trace()
    assert (call.sent_s, call.received_s) == (1.0, 2.0)
    assert stats.take_trace() == ()
