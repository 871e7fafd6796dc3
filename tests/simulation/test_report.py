"""Percentiles, and what clients saw, on samples made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.errors import Unavailable
from core.records import Call, CallTrace, SpeculationStats
from simulation.measure import Percentiles, StreamRecord, sum_up


def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed():
    hundred = Percentiles.of(range(100, 0, -1))
    assert (hundred.p50, hundred.p95, hundred.p99, hundred.mean) == (50, 95, 99, 50.5)
    assert Percentiles.of([1.0, 2.0]).p50 == 1.0
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0, 3.0)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_the_tokens_of_a_chunk_come_together():
    stream = StreamRecord(1.0, arrivals=[(2.0, 1), (2.5, 3), (2.75, 2)])
    assert list(stream.gaps_s()) == pytest.approx([0.5, 0.0, 0.0, 0.25, 0.0])
    assert (stream.num_tokens, stream.num_later_tokens) == (6, 5)
    assert (stream.decoding_s, stream.ended_s) == (0.75, 2.75)


def test_a_stream_that_got_nothing_ends_where_it_began():
    assert StreamRecord(1.0).ended_s == 1.0
    assert list(StreamRecord(1.0).gaps_s()) == []


CLUSTER = SimpleNamespace(
    targets=SimpleNamespace(busy_s=4.0, replicas=["a", "b"]),
    drafts=SimpleNamespace(busy_s=3.0, replicas=["c", "d", "e"]),
)
STATS = SpeculationStats(
    num_rounds=3,
    num_drafted_tokens=8,
    num_accepted_tokens=2,
    num_hits=1,
    num_misses=3,
    draft_time_s=2.0,
    hidden_draft_time_s=0.5,
)
CALLS = [
    CallTrace(Call.VERIFY, 0.0, 1.0, 0),
    CallTrace(Call.GROWTH, 0.25, 0.75, 9),
    CallTrace(Call.VERIFY, 1.0, 2.0, 4),
    CallTrace(Call.BLOCK, 2.0, 2.5, 4),
    CallTrace(Call.VERIFY, 2.5, 4.5, 4),
]


def test_streams_are_summed_up_over_all_replicas_and_failed_ones_as_far_as_they_came():
    whole = StreamRecord(0.0, arrivals=[(1.0, 1), (2.0, 3), (4.0, 2)], calls=CALLS, stats=STATS)
    cut = StreamRecord(2.0, arrivals=[(5.0, 1)], error=Unavailable("gone"))
    refused = StreamRecord(3.0, error=Unavailable("none"))
    report = sum_up([whole, cut, refused], CLUSTER, control=None)
    assert (report.num_streams, report.num_failed, report.num_tokens, report.elapsed_s) == (3, 2, 7, 5.0)
    assert (report.tokens_per_s, report.tokens_per_s_a_stream) == (7 / 5, 5 / 3)
    assert (report.ttft_s.p50, report.ttft_s.p99) == (1.0, 3.0)
    assert (report.end_to_end_s.p50, report.end_to_end_s.mean) == (3.0, 3.5)
    assert (report.target_utilisation, report.draft_utilisation) == (4 / (5 * 2), 3 / (5 * 3))
    assert (report.num_rounds, report.tokens_per_round) == (2, 2.5)
    assert (report.share_of_hits, report.hit_rate, report.acceptance_rate) == (1 / 2, 1 / 4, 2 / 8)
    assert report.time_hidden == 1 / 4
    assert (report.verify_s, report.pass_s, report.block_s) == (1.5, 0.5, 0.5), "a block for the one round of two"
    assert report.formula_tokens_per_s == pytest.approx(2.5 / (0.5 * 1.5 + 0.5 * 2.0))


def test_a_run_without_streams_is_no_error():
    report = sum_up([], CLUSTER, control=None)
    assert (report.num_streams, report.tokens_per_s, report.target_utilisation, report.hit_rate) == (0, 0.0, 0.0, 0.0)
