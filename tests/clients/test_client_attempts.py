from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_client import DeadlinePassed, InvalidRequest, Overloaded, Retry, ServiceError
from outrider_client._attempts import Attempts, RetryBudget

LOST = ServiceError(grpc.StatusCode.UNAVAILABLE, "gone")
WRONG = InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, "top_p: no", "top_p")


class Clock:
    def __init__(self):
        self.time_s = 100.0

    def __call__(self):
        return self.time_s


def attempts(retry=None, *, timeout_s=None, clock=None, draw=0.5, budget=None):
    retry = retry or Retry()
    budget = budget or RetryBudget(retry.budget)
    return Attempts(retry, budget, timeout_s, clock or Clock(), lambda: draw)


def test_pauses_double_up_to_the_longest_and_are_drawn_from_all_of_their_length():
    calls = attempts(Retry(max_retries=5, initial_backoff_s=1.0, max_backoff_s=6.0), draw=0.5)
    assert [calls.failed(LOST) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert attempts(draw=0.0).failed(LOST) == 0.0


@given(st.integers(0, 10))
def test_so_many_retries_in_a_row_and_no_more(max_retries):
    calls = attempts(Retry(max_retries=max_retries))
    for _ in range(max_retries):
        calls.begin()
        calls.failed(LOST)
    calls.begin()
    with pytest.raises(ServiceError) as caught:
        calls.failed(LOST)
    assert caught.value is LOST
    assert calls.num_calls == max_retries + 1


def test_an_answer_in_between_starts_the_count_and_the_pauses_again():
    calls = attempts(Retry(max_retries=2, initial_backoff_s=1.0), draw=1.0)
    for _ in range(10):
        calls.begin()
        calls.progressed()
        assert [calls.failed(LOST), calls.failed(LOST)] == [1.0, 2.0]


def test_what_cannot_get_better_is_never_tried_again():
    with pytest.raises(InvalidRequest):
        attempts().failed(WRONG)


def test_a_server_that_says_when_is_left_alone_until_then_and_a_random_time_more():
    busy = Overloaded(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=3.0)
    assert attempts(Retry(initial_backoff_s=0.2), draw=0.5).failed(busy) == pytest.approx(3.1)
    assert attempts(draw=0.0).failed(busy) == 3.0


def test_each_call_has_what_is_left_of_the_time():
    clock = Clock()
    calls = attempts(timeout_s=10.0, clock=clock)
    assert calls.begin() == 10.0
    clock.time_s += 4.0
    calls.failed(LOST)
    assert calls.begin() == 6.0
    assert attempts().begin() is None


def test_no_call_begins_when_the_time_is_over():
    clock = Clock()
    calls = attempts(timeout_s=1.0, clock=clock)
    clock.time_s += 1.0
    with pytest.raises(DeadlinePassed, match="1 s"):
        calls.begin()


def test_a_pause_that_would_outlast_the_time_is_not_begun():
    calls = attempts(Retry(initial_backoff_s=4.0), timeout_s=2.0, draw=0.5)
    with pytest.raises(DeadlinePassed) as caught:
        calls.failed(LOST)
    assert caught.value.__cause__ is LOST


def test_the_budget_is_shared_and_answers_give_back():
    budget = RetryBudget(3)
    retry = Retry(max_retries=100)
    first, second = attempts(retry, budget=budget), attempts(retry, budget=budget)
    first.begin()
    for calls in (first, second, first):
        calls.failed(LOST)
    with pytest.raises(ServiceError):
        second.failed(LOST)
    first.begin()
    for _ in range(5):  # chunks of one answer
        first.progressed()
    first.failed(LOST)
    with pytest.raises(ServiceError):
        first.failed(LOST)


def test_each_call_that_is_answered_gives_back():
    calls = attempts(Retry(max_retries=100), budget=RetryBudget(1))
    for _ in range(3):
        calls.begin()
        calls.progressed()
        calls.failed(LOST)
    with pytest.raises(ServiceError):
        calls.failed(LOST)


def test_a_budget_never_holds_more_than_at_first():
    budget = RetryBudget(2)
    for _ in range(5):
        budget.refund()
    assert [budget.spend() for _ in range(3)] == [True, True, False]
