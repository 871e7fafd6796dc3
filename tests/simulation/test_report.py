"""Percentiles, and what clients saw, on samples made by hand."""

from __future__ import annotations

import pytest

from orchestrator.simulation.report import Percentiles, StreamSeen


def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed():
    hundred = Percentiles.of(range(100, 0, -1))
    assert (hundred.p50, hundred.p95, hundred.p99, hundred.mean) == (50, 95, 99, 50.5)
    assert Percentiles.of([1.0, 2.0]).p50 == 1.0
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0, 3.0)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_the_tokens_of_a_chunk_come_together():
    seen = StreamSeen(1.0, arrivals=[(2.0, 1), (2.5, 3), (2.75, 2)])
    assert list(seen.gaps_s()) == pytest.approx([0.5, 0.0, 0.0, 0.25, 0.0])
    assert (seen.num_tokens, seen.num_later_tokens) == (6, 5)
    assert (seen.decoding_s, seen.ended_s) == (0.75, 2.75)


def test_a_stream_that_got_nothing_ends_where_it_began():
    assert StreamSeen(1.0).ended_s == 1.0
    assert list(StreamSeen(1.0).gaps_s()) == []
