"""Counts when something is killed under streams, on streams made by hand."""

from __future__ import annotations

from bench.disruption.kills import Death, WatchedStream, _results
from bench.harness.traffic import Arrival, Run
from protos.outrider.v1 import generation_pb2 as pb


def stream(times, tokens=(1, 2, 3), expected=(1, 2, 3), failure=""):
    found = WatchedStream(expected, failure=failure)
    for at_s, token in zip(times, tokens, strict=True):
        found.take(Arrival(at_s, (token,), 0))
    return found


def test_a_stall_is_the_longest_gap_that_ends_after_the_death():
    assert stream([0, 5, 6]).stall_s(5.5) == 1
    assert stream([0, 5, 6]).stall_s(4) == 5
    assert stream([0, 5, 6]).stall_s(7) == 0


def test_failed_and_changed_streams_are_counted_and_judged():
    good, failed, changed = stream([0, 1, 2]), stream([], (), failure="lost"), stream([0, 1, 4], (1, 9, 3))
    results = {
        r.name: r for r in _results("draft killed 2 times", [Death(0.5, (good, failed), 3), Death(0.5, (changed,), 5)])
    }
    by_end = {name.partition(": ")[2]: result for name, result in results.items()}
    assert (by_end["failed streams"].value, by_end["failed streams"].met) == (1, False)
    assert (by_end["streams unlike plain decoding"].value, by_end["streams unlike plain decoding"].met) == (1, False)
    assert by_end["longest gap in a stream, p99"].met is False
    assert by_end["replaced after"].value == 4
    harmless = _results("draft killed 1 times", [Death(0.1, (stream([0, 0.29, 0.58]),), 3)])
    assert [result.met for result in harmless] == [True, True, True, None]
    assert _results("draft killed 1 times", [Death(0.1, (stream([0, 0.31, 0.4]),), 3)])[2].met is False


def test_a_cut_stream_is_not_like_plain_decoding():
    """One that ends early without an error has lost tokens."""
    (_, changed, _, _) = _results("target killed 1 times", [Death(0, (stream([0, 1], (1, 2)),), 1)])
    assert changed.met is False


def test_a_run_reads_its_arrivals():
    run = Run(1.0, (Arrival(3.0, (1, 2), 0), Arrival(4.5, (3,), 1)), (), pb.SpeculationStats())
    assert run.tokens == (1, 2, 3)
    assert run.decode_s == 1.5
    assert run.longest_gap_s == 2.0
