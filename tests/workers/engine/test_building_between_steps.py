"""The loop has the engine build what the start left out while nobody waits, one part at a time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from core.errors import WorkerLost
from tests.workers.engine.test_engine_thread import FakeEngine, asked, doubles
from workers.engine.thread import EngineLoop


class BuildingEngine(FakeEngine):
    """Has parts to build: some when it is idle, or `due` ones between two steps."""

    def __init__(self, num_parts, num_due=0):
        super().__init__()
        self.num_parts, self.num_due = num_parts, num_due
        self.events = []
        self.asked_in_vain = threading.Event()

    def step(self):
        replies = super().step()
        self.events.append("step")
        return replies

    def build_more(self, *, is_idle):
        if not (self.num_parts if is_idle else self.num_due):
            if is_idle:
                self.asked_in_vain.set()
            return False
        self.num_parts -= is_idle
        self.num_due -= not is_idle
        self.events.append("idle" if is_idle else "due")
        return True


async def test_an_idle_engine_builds_all_that_the_start_left_out_and_then_waits(monkeypatch):
    monkeypatch.setattr("workers.engine.thread.IDLE_S", 0.001)
    loop = EngineLoop(engine := BuildingEngine(num_parts=3))
    loop.start()
    assert await asyncio.to_thread(engine.asked_in_vain.wait, 30)
    engine.asked_in_vain.clear()
    assert engine.events == ["idle"] * 3
    await doubles(loop, 1)
    monkeypatch.setattr("workers.engine.thread.EXPIRY_PERIOD_S", 0.001)
    await doubles(loop, 2)
    await asyncio.sleep(0.05)
    assert not engine.asked_in_vain.is_set(), "nothing is left, so that it waits for orders alone"
    await loop.close()


async def test_a_pause_between_two_rounds_is_not_idle(monkeypatch):
    monkeypatch.setattr("workers.engine.thread.IDLE_S", 30.0)
    loop = EngineLoop(engine := BuildingEngine(num_parts=100))
    loop.start()
    for number in range(1, 12):
        await doubles(loop, number)
        await loop.ask(lambda _: None)
    await loop.close()
    assert engine.events == ["step"] * 11


async def test_a_reply_does_not_wait_for_what_is_built_after_its_step():
    engine, taken = BuildingEngine(num_parts=0, num_due=1), threading.Event()
    build = engine.build_more

    def build_when_the_reply_is_taken(*, is_idle):
        assert taken.wait(10), "the reply has not come"
        return build(is_idle=is_idle)

    engine.build_more = build_when_the_reply_is_taken
    loop = EngineLoop(engine)
    loop.start()
    await loop.exchange(asked(1), lambda _: taken.set())
    await doubles(loop, 2)
    assert engine.events == ["step", "due", "step"]
    await loop.close()


async def test_a_step_that_waits_is_delayed_by_one_part_at_most(monkeypatch):
    """Requests arrive while the first part is built, of two that are due and many that are not."""
    monkeypatch.setattr("workers.engine.thread.IDLE_S", 0.001)
    engine = BuildingEngine(num_parts=100, num_due=2)
    is_building, has_asked, build = threading.Event(), threading.Event(), engine.build_more

    def build_until_they_ask(*, is_idle):
        is_building.set()
        assert has_asked.wait(30)
        return build(is_idle=is_idle)

    engine.build_more = build_until_they_ask
    loop = EngineLoop(engine)
    loop.start()
    assert await asyncio.to_thread(is_building.wait, 30)
    replies = asyncio.create_task(doubles(loop, 1, 2, 3))
    await asyncio.sleep(0)  # the requests are posted
    has_asked.set()
    assert await replies == [2, 4, 6]
    await loop.close()
    assert engine.events[:6] == ["idle", "step", "due", "step", "due", "step"]


async def test_an_engine_that_is_closed_builds_no_more():
    loop = EngineLoop(engine := BuildingEngine(num_parts=100))
    loop.start()
    await loop.ask(lambda _: None)
    num_events = len(engine.events)
    await loop.close()
    assert len(engine.events) == num_events


async def test_an_engine_that_is_lost_while_it_builds_loses_its_callers(monkeypatch):
    monkeypatch.setattr("workers.engine.thread.IDLE_S", 0.001)
    engine = FakeEngine()

    def lose(*, is_idle):
        raise WorkerLost("a rank is lost")

    engine.build_more = lose
    loop = EngineLoop(engine)
    loop.start()
    with pytest.raises(WorkerLost, match="a rank is lost"):
        await loop.until_end()
