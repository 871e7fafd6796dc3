"""Figures of a run, on arrivals and streams that one can work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.cli.load.driver import arrivals_s, starts_s
from deploy.cli.load.prompts import Lengths, Workload
from deploy.cli.load.records import Arrival, Counts, RequestOutcome, RequestRecord
from deploy.cli.load.summary import Latency, Objectives, summarize


def record(index=0, intended_s=0.0, sent_s=None, pieces=(), ended_s=1.0, outcome=RequestOutcome.COMPLETED, counts=None):
    found = RequestRecord(index, intended_s, intended_s if sent_s is None else sent_s)
    for at_s, num in pieces:
        found.observe(at_s, Arrival(num, 7))
    found.ended_s, found.outcome, found.counts = ended_s, outcome, counts
    return found


# One request


def test_latencies_count_from_the_intended_time():
    late = record(intended_s=1.0, sent_s=1.5, pieces=[(2.0, 1), (2.25, 3), (3.0, 1)], ended_s=3.1)
    assert late.lateness_s == 0.5
    assert late.ttft_s == 1.0
    assert late.e2e_s == pytest.approx(2.1)
    assert late.itl_s == [0.25, 0.75]
    assert late.tpot_s == pytest.approx(1.0 / 4)  # four tokens follow the first piece
    assert (late.output_tokens, late.prompt_tokens) == (5, 7)


def test_a_request_without_or_with_one_piece_has_no_time_a_token():
    assert record().ttft_s is None
    assert record().tpot_s is None
    one = record(pieces=[(0.5, 3)])
    assert (one.ttft_s, one.tpot_s, one.itl_s) == (0.5, None, [])


# Many


def test_percentiles_are_interpolated():
    found = Latency.of(float(value) for value in range(101))
    assert found is not None
    assert found.percentiles_s == {50: 50.0, 90: 90.0, 99: 99.0}
    assert (found.mean_s, found.max_s) == (50.0, 100.0)
    assert Latency.of([]) is None


def test_a_summary_by_hand():
    records = [
        record(0, 0.0, pieces=[(0.1, 1), (0.3, 4)], ended_s=0.3, counts=Counts(6, 3, 2)),
        record(1, 1.0, pieces=[(1.5, 1), (2.5, 9)], ended_s=2.5, counts=Counts(10, 5, 3)),
        record(2, 2.0, pieces=[(2.1, 2)], ended_s=2.2, outcome=RequestOutcome.CANCELLED),
        record(3, 3.0, ended_s=3.1, outcome=RequestOutcome.REFUSED),
        record(4, 4.0, ended_s=5.0, outcome=RequestOutcome.FAILED),
    ]
    records[3].error, records[4].error = "RESOURCE_EXHAUSTED", "TIMEOUT"
    summary = summarize(records, Objectives(ttft_s=0.2))
    assert summary.duration_s == 5.0
    assert summary.outcomes == {"completed": 2, "cancelled": 1, "refused": 1, "failed": 1}
    assert summary.errors == {"RESOURCE_EXHAUSTED": 1, "TIMEOUT": 1}
    assert summary.requests_per_s == 2 / 5
    assert summary.output_tokens == 17  # those of the cancelled one, too
    assert summary.latencies["ttft"].percentiles_s[50] == pytest.approx(0.3)  # 0.1 and 0.5: cancelled ones are left out
    assert summary.latencies["e2e"].max_s == 1.5
    assert summary.goodput_per_s == 1 / 5
    assert summary.good_share == 1 / 4  # what was refused or failed was not good; what was given up is not counted
    assert summary.acceptance == 8 / 16
    assert summary.tokens_per_pass == 15 / 5


@pytest.mark.parametrize(
    ("objectives", "is_met"),
    [
        (Objectives(), True),
        (Objectives(ttft_s=0.5, tpot_s=0.25, e2e_s=1.0), True),
        (Objectives(ttft_s=0.49), False),
        (Objectives(tpot_s=0.24), False),
        (Objectives(e2e_s=0.99), False),
    ],
)
def test_goodput_wants_all_objectives(objectives, is_met):
    one = record(pieces=[(0.5, 1), (1.0, 2)], ended_s=1.0)
    assert objectives.are_met(one) is is_met
    one.outcome = RequestOutcome.FAILED
    assert not objectives.are_met(one)


# When


def test_even_arrivals_have_the_rate():
    assert arrivals_s(4, 2.0, "constant", 0.0, 0).tolist() == [0.0, 0.5, 1.0, 1.5]


def test_a_ramp_sends_half_of_what_the_full_rate_would_and_then_keeps_it():
    times = arrivals_s(41, 10.0, "constant", 4.0, 0)
    assert times[20] == pytest.approx(4.0)  # 10 / s x 4 s / 2
    assert np.diff(times[20:]) == pytest.approx(0.1)
    assert np.all(np.diff(times[:21], 2) < 0)  # ever closer
    assert times[5] == pytest.approx(2.0)  # a quarter of them in the first half


def test_poisson_arrivals_have_mean_and_spread_of_exponential_gaps_and_a_seed():
    gaps = np.diff(arrivals_s(20_000, 5.0, "poisson", 0.0, 3))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    again, other = (arrivals_s(9, 5.0, "poisson", 0.0, seed) for seed in (3, 4))
    assert np.array_equal(again, arrivals_s(9, 5.0, "poisson", 0.0, 3))
    assert not np.array_equal(again, other)


def test_the_callers_of_a_closed_loop_begin_one_by_one():
    assert starts_s(4, 2.0).tolist() == [0.0, 0.5, 1.0, 1.5]


# What


def test_requests_are_those_of_their_seed_and_lengths_in_range():
    workload = Workload([], Lengths(3, 5), 50, Lengths(2, 4), cancel_share=0.5, seed=1)
    requests = list(workload.requests(200))
    assert requests == list(workload.requests(200))
    assert {len(request.prompt) for request in requests} == {3, 4, 5}
    assert {request.max_tokens for request in requests} == {2, 3, 4}
    assert all(0 <= token < 50 for request in requests for token in request.prompt)
    given_up = [request for request in requests if request.cancel_after_tokens is not None]
    assert 70 < len(given_up) < 130
    assert all(1 <= request.cancel_after_tokens <= request.max_tokens for request in given_up)
    assert len({request.seed for request in requests}) == 200


def test_prompts_of_a_file_come_in_turn():
    workload = Workload(["a", "b"], Lengths(1, 1), 0, Lengths(1, 1), cancel_share=0.0, seed=0)
    assert [request.prompt for request in workload.requests(3)] == ["a", "b", "a"]


def test_lengths_are_one_or_a_range():
    assert (Lengths.parse("5"), Lengths.parse("3-5")) == (Lengths(5, 5), Lengths(3, 5))
    assert (str(Lengths(5, 5)), str(Lengths(3, 5))) == ("5", "3-5")


@pytest.mark.parametrize("text", ["0", "5-3", "x", ""])
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError, match=r"must be N or LOW-HIGH"):
        Lengths.parse(text)
