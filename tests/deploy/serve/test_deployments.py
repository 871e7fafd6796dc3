"""Replicas of engines report on themselves, without Ray; the rest is tested with it (test_leases)."""

from __future__ import annotations

import dataclasses
import time

import pytest

from core.records.statistics import EngineStats
from deploy.serve.autoscaling import BUSY, KV_USE, ROUND_S, WAITED_S
from deploy.serve.deployments import DraftWorker, TargetWorker


def stats(**values: float) -> EngineStats:
    nothing = {field.name: 0 for field in dataclasses.fields(EngineStats)}
    return EngineStats(**{**nothing, **values})


@pytest.fixture
def draft(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    worker = DraftWorker.__new__(DraftWorker)
    worker._waited_s = worker._round_s = 0.0
    worker._reported_s, worker._reported_step_time_s = time.monotonic(), 0.0
    worker.now_s = now_s
    return worker


async def test_a_draft_tells_of_waits_since_it_last_did(draft):
    for waited_s in (1.0, 2.0):
        await draft.report_wait(waited_s, 10.0)
    first, second = draft._measure(stats()), draft._measure(stats())
    assert (first[WAITED_S], first[ROUND_S]) == (3.0, 20.0)
    assert (second[WAITED_S], second[ROUND_S]) == (0.0, 0.0)


def test_a_draft_is_as_busy_as_it_was_since_it_last_told(draft):
    """The last one is another engine, which has computed for a second in all."""
    for step_time_s, now_s, share in ((2.0, 110.0, 0.2), (7.0, 120.0, 0.5), (1.0, 130.0, 0.0), (4.0, 140.0, 0.3)):
        draft.now_s[0] = now_s
        assert draft._measure(stats(step_time_s=step_time_s))[BUSY] == pytest.approx(share)


def test_a_targets_kv_is_used_where_it_is_not_free():
    worker = TargetWorker.__new__(TargetWorker)
    assert worker._measure(stats(num_blocks=8, num_free_blocks=2)) == {KV_USE: 0.75}
    assert worker._measure(stats()) == {KV_USE: 1.0}
    recurrent = stats(num_blocks=8, num_free_blocks=2, num_states=10, num_free_states=1)
    assert worker._measure(recurrent) == {KV_USE: 0.9}, "states run out before blocks do"


async def test_a_target_that_says_nothing_is_the_last_to_be_sent_anybody():
    async def nothing():
        return None

    worker = TargetWorker.__new__(TargetWorker)
    worker._stats = nothing
    assert await worker.record_routing_stats() == {KV_USE: 1.0}
    assert await worker.record_autoscaling_stats() == {}
