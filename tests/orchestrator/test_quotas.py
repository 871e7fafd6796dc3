"""Token buckets, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import Limits
from core.errors import Overloaded
from core.records import BeamSearch, GenerationRequest, Quota, Sampling
from orchestrator import quotas
from orchestrator.quotas import Quotas


class Time:
    now_s = 0.0

    def now(self):
        return self.now_s


def request(caller="a", prompt_tokens=10, max_tokens=50, expected_tokens=None, **quota):
    prompt, own = (1,) * prompt_tokens, Quota(**quota)
    return GenerationRequest(
        "r", prompt, Sampling(), max_tokens, caller=caller, quota=own, expected_tokens=expected_tokens
    )


def test_requests_of_a_minute_are_counted_for_each_caller():
    time = Time()
    counted = Quotas(Limits(max_requests_per_minute=2), time)
    for caller in ("a", "a", "b"):
        counted.take([request(caller)])
    with pytest.raises(Overloaded, match="quota of 2 requests a minute is used up; try again in 30 s") as caught:
        counted.take([request("a")])
    assert caught.value.retry_after_s == pytest.approx(30.0)
    time.now_s = 30.0
    counted.take([request("a")])
    with pytest.raises(Overloaded):
        counted.take([request("a")])


def test_tokens_count_as_asked_for_until_the_end_and_as_used_after_it():
    counted = Quotas(Limits(max_tokens_per_minute=100), Time())
    charge = counted.take([request()])
    with pytest.raises(Overloaded, match="100 tokens a minute"):
        counted.take([request()])
    charge.settle(0, 10 + 10)
    counted.take([request()])


def test_a_beam_search_counts_for_all_outputs_that_it_returns():
    counted = Quotas(Limits(max_tokens_per_minute=200), Time())
    search = replace(request(), beams=BeamSearch(8, 3))
    charge = counted.take([search])
    with pytest.raises(Overloaded, match="200 tokens a minute"):
        counted.take([request(prompt_tokens=1, max_tokens=40)])
    charge.settle(0, 10 + 3 * 50)
    counted.take([request(prompt_tokens=1, max_tokens=39)])


def test_an_output_that_is_longer_than_expected_counts_when_it_ends_and_those_after_it_wait():
    time = Time()
    counted = Quotas(Limits(max_tokens_per_minute=100), time)
    charge = counted.take([request(prompt_tokens=10, max_tokens=5000, expected_tokens=20)])
    later = counted.take([request(prompt_tokens=10, max_tokens=50)])
    charge.settle(0, 10 + 80)
    later.settle(0, 10 + 50)
    time.now_s = 30.0
    with pytest.raises(Overloaded, match="in 6 s"):  # 100 - 90 - 60 + 50 are there, and 10 are wanted
        counted.take([request(prompt_tokens=1, max_tokens=9)])
    time.now_s = 36.0
    counted.take([request(prompt_tokens=1, max_tokens=9)])


def test_what_is_refused_counts_against_no_quota():
    time = Time()
    counted = Quotas(Limits(max_requests_per_minute=1, max_tokens_per_minute=100), time)
    charge = counted.take([request(max_tokens=80)])
    with pytest.raises(Overloaded):
        counted.take([request()])
    charge.undo()
    counted.take([request(max_tokens=80)])


def test_a_request_larger_than_a_quota_needs_a_whole_one():
    time = Time()
    counted = Quotas(Limits(max_tokens_per_minute=100), time)
    counted.take([request(max_tokens=5000)])
    with pytest.raises(Overloaded, match="in 60 s"):
        counted.take([request(max_tokens=5000)])
    time.now_s = 60.0
    counted.take([request(max_tokens=5000)])


def test_a_request_larger_than_a_quota_is_given_back_no_more_than_was_counted():
    counted = Quotas(Limits(max_tokens_per_minute=100), Time())
    charge = counted.take([request(max_tokens=5000)])
    charge.settle(0, 10 + 60)
    with pytest.raises(Overloaded, match="in 18 s"):
        counted.take([request(max_tokens=50)])
    charge = counted.take([request(max_tokens=20)])
    charge.settle(0, 10 + 20)
    with pytest.raises(Overloaded, match="in 60 s"):
        counted.take([request(max_tokens=5000)])


def test_the_samples_of_a_call_are_counted_all_or_none():
    counted = Quotas(Limits(max_requests_per_minute=5, max_tokens_per_minute=1000), Time())
    counted.take([request()] * 3)
    with pytest.raises(Overloaded, match="5 requests a minute is used up; try again in 12 s"):
        counted.take([request()] * 3)
    counted.take([request()] * 2)
    with pytest.raises(Overloaded, match="5 requests"):
        counted.take([request()])


def test_each_sample_gives_back_what_it_does_not_use_and_together_no_more_than_was_counted():
    """Three samples of 60 tokens count 100, the whole quota: until they have used less, nothing comes back."""
    counted = Quotas(Limits(max_tokens_per_minute=100), Time())
    charge = counted.take([request()] * 3)
    charge.settle(0, 20)
    with pytest.raises(Overloaded):
        counted.take([request(prompt_tokens=1, max_tokens=1)])
    charge.settle(1, 20)
    charge.settle(2, 30)
    counted.take([request(prompt_tokens=10, max_tokens=20)])
    with pytest.raises(Overloaded):
        counted.take([request(prompt_tokens=1, max_tokens=1)])


def test_a_caller_s_own_quota_stands_in_place_of_the_service_s_each_by_itself():
    counted = Quotas(Limits(max_requests_per_minute=1, max_tokens_per_minute=100), Time())
    for _ in range(2):  # 60 tokens each, of 120
        counted.take([request("own", max_requests_per_minute=0, max_tokens_per_minute=120)])
    with pytest.raises(Overloaded, match="120 tokens a minute"):
        counted.take([request("own", max_requests_per_minute=0, max_tokens_per_minute=120)])
    counted.take([request("half", max_tokens_per_minute=0)])
    with pytest.raises(Overloaded, match="1 requests a minute"):
        counted.take([request("half", max_tokens_per_minute=0)])


@pytest.mark.parametrize(("before", "after", "left"), [(100, 200, 80), (200, 100, 70), (100, 60, 24)])
def test_of_a_quota_that_is_changed_the_same_share_is_left(before, after, left):
    """60 tokens are taken of the first: 40 of 100 are 80 of 200."""
    counted = Quotas(Limits(), Time())
    counted.take([request(max_tokens_per_minute=before)])
    with pytest.raises(Overloaded):
        counted.take([request(max_tokens=left - 9, max_tokens_per_minute=after)])
    counted.take([request(max_tokens=left - 10, max_tokens_per_minute=after)])


def test_to_change_between_keys_with_other_quotas_gains_nothing():
    counted = Quotas(Limits(), Time())
    counted.take([request(max_tokens=90, max_tokens_per_minute=100)])
    for own in (10, 1000, 10, 100):
        with pytest.raises(Overloaded):
            counted.take([request(prompt_tokens=1, max_tokens=1, max_tokens_per_minute=own)])


def test_what_is_given_back_after_a_change_fills_no_more_than_the_quota():
    time = Time()
    counted = Quotas(Limits(), time)
    charge = counted.take([request(max_tokens_per_minute=100)])
    counted.take([request(prompt_tokens=1, max_tokens=1, max_tokens_per_minute=10)])
    time.now_s += 30.0  # 2 of 10 and 5 more
    charge.undo()
    counted.take([request(prompt_tokens=1, max_tokens=9, max_tokens_per_minute=10)])
    with pytest.raises(Overloaded):
        counted.take([request(prompt_tokens=1, max_tokens=0, max_tokens_per_minute=10)])


def test_of_a_quota_that_was_changed_the_same_share_is_given_back():
    """90 of 100 are taken and 10 of these not used, which are 1 of 10: else another key's smaller quota would be full
    again, and the large one with it."""
    counted = Quotas(Limits(), Time())
    charge = counted.take([request(max_tokens=80, max_tokens_per_minute=100)])
    counted.take([request(prompt_tokens=1, max_tokens=0, max_tokens_per_minute=10)])
    charge.settle(0, 80)
    with pytest.raises(Overloaded):
        counted.take([request(prompt_tokens=1, max_tokens=10, max_tokens_per_minute=100)])
    counted.take([request(prompt_tokens=1, max_tokens=9, max_tokens_per_minute=100)])


def test_without_quotas_nothing_is_refused():
    counted = Quotas(Limits(), Time())
    for _ in range(1000):
        counted.take([request()])
    assert not counted._buckets["a"]


def test_callers_that_have_their_whole_quota_are_forgotten(monkeypatch):
    monkeypatch.setattr(quotas, "MAX_CALLERS", 3)
    time = Time()
    counted = Quotas(Limits(max_requests_per_minute=60), time)
    for number in range(50):
        counted.take([request(f"caller {number}")])
        time.now_s += 1.0
    assert len(counted._buckets) <= 4
