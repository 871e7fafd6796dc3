"""Open and closed loop against callers that are written down here, on a virtual clock."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from deploy.cli.load.callers import CallFailed
from deploy.cli.load.driver import Driver
from deploy.cli.load.records import Arrival, Counts, LoadRequest, RequestOutcome
from simulation.clock import VirtualClock, VirtualLoop

LAST = Counts(0, 0, 1)


class SlowService:
    """One place: each request takes a second for each of its tokens, and the others wait."""

    def __init__(self, fails: dict[int, CallFailed] | None = None) -> None:
        self.place = asyncio.Semaphore(1)
        self.num_closed = 0
        self.fails = fails or {}

    async def stream(self, request):
        try:
            if request.seed in self.fails:
                raise self.fails[request.seed]
            async with self.place:
                for index in range(request.max_tokens):
                    await asyncio.sleep(1.0)
                    yield Arrival(1, 3, LAST if index == request.max_tokens - 1 else None)
        finally:
            self.num_closed += 1

    async def vocab_size(self):
        return 10

    async def close(self):
        """Nothing is open."""


def requests(num, max_tokens=2, cancel_after_tokens=None):
    return (LoadRequest("a", max_tokens, seed, cancel_after_tokens) for seed in range(num))


def ran(run, service=None, *, duration_s=100.0, timeout_s=50.0):
    """The driver after `run(driver)`, on a clock of its own."""
    loop = VirtualLoop()
    try:
        limits = {"duration_s": duration_s, "timeout_s": timeout_s}
        driver = Driver(service or SlowService(), VirtualClock(loop), lambda _: None, **limits)
        loop.run_until_complete(run(driver))
        return driver.records
    finally:
        loop.close()


def test_an_open_loop_sends_on_time_and_does_not_hide_the_queue():
    records = ran(lambda driver: driver.open_loop(requests(4), [0.0, 1.0, 2.0, 3.0]))
    assert [record.sent_s for record in records] == [0.0, 1.0, 2.0, 3.0]
    assert [record.ttft_s for record in records] == [1.0, 2.0, 3.0, 4.0]  # 2 s of work come each second
    assert [record.e2e_s for record in records] == [2.0, 3.0, 4.0, 5.0]
    assert {record.outcome for record in records} == {RequestOutcome.COMPLETED}


def test_a_closed_loop_waits_for_answers():
    records = ran(lambda driver: driver.closed_loop(requests(4), [0.0]))
    assert [record.intended_s for record in records] == [0.0, 2.0, 4.0, 6.0]
    assert [record.e2e_s for record in records] == [2.0] * 4


def test_as_many_callers_as_starts_share_the_requests():
    records = ran(lambda driver: driver.closed_loop(requests(5), [0.0, 0.5]))
    assert [record.intended_s for record in records] == [0.0, 0.5, 2.0, 4.0, 6.0]
    assert sorted(record.index for record in records) == list(range(5))


def test_a_request_is_given_up_after_its_tokens_and_its_stream_is_closed():
    service = SlowService()
    records = ran(lambda driver: driver.closed_loop(requests(2, 5, cancel_after_tokens=2), [0.0]), service)
    assert [record.outcome for record in records] == [RequestOutcome.CANCELLED] * 2
    assert [record.output_tokens for record in records] == [2, 2]
    assert [record.intended_s for record in records] == [0.0, 2.0]
    assert service.num_closed == 2


def test_one_that_ends_before_it_would_be_given_up_is_complete():
    (record,) = ran(lambda driver: driver.closed_loop(requests(1, 2, cancel_after_tokens=2), [0.0]))
    assert record.outcome is RequestOutcome.COMPLETED


def test_nothing_is_sent_after_the_duration():
    assert len(ran(lambda driver: driver.closed_loop(requests(100), [0.0]), duration_s=3.0)) == 2  # at 0 and 2 s
    assert (
        len(ran(lambda driver: driver.open_loop(requests(100), [float(at) for at in range(100)]), duration_s=3.0)) == 4
    )


def test_what_takes_too_long_has_failed_and_is_closed():
    service = SlowService()
    (record,) = ran(lambda driver: driver.closed_loop(requests(1, 9), [0.0]), service, duration_s=10.0, timeout_s=3.5)
    assert (record.outcome, record.error, record.output_tokens) == (RequestOutcome.FAILED, "TIMEOUT", 3)
    assert service.num_closed == 1


def test_refusals_and_failures_are_told_apart_and_end_nothing_else():
    fails = {
        0: CallFailed("RESOURCE_EXHAUSTED", "full", is_refusal=True),
        1: CallFailed("INTERNAL", "broken", is_refusal=False),
    }
    records = ran(lambda driver: driver.open_loop(requests(3), [0.0, 0.0, 0.0]), SlowService(fails))
    assert [record.outcome for record in records] == [
        RequestOutcome.REFUSED,
        RequestOutcome.FAILED,
        RequestOutcome.COMPLETED,
    ]
    assert [record.error for record in records] == ["RESOURCE_EXHAUSTED", "INTERNAL", ""]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_request_is_sent_once(concurrency):
    indices = count()
    records = ran(lambda driver: driver.closed_loop(requests(7), [0.0] * concurrency))
    assert [record.index for record in records] == [next(indices) for _ in records] == list(range(7))
