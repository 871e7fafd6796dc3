"""The loop: every caller is answered or told that the engine is lost; nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from core.errors import WorkerLost
from core.records import DraftUpdate, Refused, Stamp, Timing, Verdict
from core.speculation.growth import NewNodes
from workers.engine import thread
from workers.engine.thread import EngineLoop


class FakeEngine:
    """Answers each request with its double, one a step; fails on 13."""

    def __init__(self):
        self.waiting = []
        self.released = []

    @property
    def has_work(self):
        return bool(self.waiting)

    def add(self, ticket, request):
        self.waiting.append((ticket, request))

    def step(self):
        ticket, request = self.waiting.pop(0)
        if request == 13:
            raise RuntimeError("thirteen")
        return [(ticket, 2 * request)]

    def release(self, sessions):
        self.released += sessions

    def expire(self):
        return []


class BusyEngine(FakeEngine):
    """Has work for ever."""

    has_work = True

    def __init__(self):
        super().__init__()
        self.has_expired = threading.Event()

    def step(self):
        time.sleep(0.001)
        return []

    def expire(self):
        self.has_expired.set()
        return []


@pytest.fixture
async def loop():
    loop = EngineLoop(FakeEngine())
    loop.start()
    yield loop
    await loop.close()


async def test_replies_come_in_the_order_of_the_batch(loop):
    batches = [[1, 2, 3], [4], [], [5, 6]]
    assert await asyncio.gather(*map(loop.submit, batches)) == [[2, 4, 6], [8], [], [10, 12]]


async def test_each_reply_is_taken_after_its_step_on_the_callers_loop(loop):
    taken, thread = [], threading.get_ident()
    two_steps = loop.submit([1, 2], lambda reply: taken.append((reply, threading.get_ident())))
    assert await two_steps == [2, 4]
    assert taken == [(2, thread), (4, thread)]


async def test_a_reply_is_taken_before_those_of_later_steps_are_ready():
    engine, taken, has_first = FakeEngine(), [], threading.Event()
    step = engine.step

    def step_when_the_first_is_taken():
        if len(engine.waiting) == 1:
            assert has_first.wait(10), "the reply of the first step has not come"
        return step()

    engine.step = step_when_the_first_is_taken
    loop = EngineLoop(engine)
    loop.start()
    assert await loop.submit([1, 2], lambda reply: (taken.append(reply), has_first.set())) == [2, 4]
    assert taken == [2, 4]
    await loop.close()


async def test_silent_sessions_expire_on_an_engine_that_is_never_idle(monkeypatch):
    monkeypatch.setattr("workers.engine.thread.EXPIRY_PERIOD_S", 0.01)
    loop = EngineLoop(engine := BusyEngine())
    loop.start()
    assert await asyncio.to_thread(engine.has_expired.wait, 30)
    await loop.close()


async def test_orders_are_carried_out_between_steps(loop):
    await loop.release(["a", "b"])
    assert await loop.ask(lambda engine: list(engine.released)) == ["a", "b"]
    with pytest.raises(ZeroDivisionError):
        await loop.ask(lambda _: 1 // 0)
    assert await loop.submit([1]) == [2], "a question that fails harms nobody else"


async def test_a_caller_that_is_cancelled_does_not_disturb_the_others(loop):
    cancelled = asyncio.ensure_future(loop.submit([1, 2]))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await loop.submit([3]) == [6]


async def test_a_question_that_nobody_waits_for_any_more_ends_nothing(loop):
    may_go_on, asked = threading.Event(), []
    busy = asyncio.ensure_future(loop.ask(lambda _: may_go_on.wait(10)))
    cancelled = asyncio.ensure_future(loop.ask(asked.append))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await asyncio.sleep(0.01)  # for the engine's side to hear of it
    may_go_on.set()
    assert await busy
    async with asyncio.timeout(10):
        assert await loop.submit([1]) == [2]
    assert not asked


async def test_an_engine_that_fails_is_lost_to_all_who_wait_and_to_all_who_come(loop):
    waiting = [asyncio.ensure_future(loop.submit(batch)) for batch in ([13], [1, 13], [7])]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(result, WorkerLost) for result in results)
    for result in results:
        assert isinstance(result, WorkerLost | list)
    with pytest.raises(WorkerLost, match="thirteen"):
        await loop.submit([1])


class FakeStuckEngine(FakeEngine):
    """Fails in its first step, as soon as a test lets it."""

    def __init__(self):
        super().__init__()
        self.is_in_step, self.may_fail = threading.Event(), threading.Event()

    def step(self):
        self.is_in_step.set()
        self.may_fail.wait()
        raise RuntimeError("thirteen")


async def test_orders_that_were_given_during_the_step_that_fails_are_lost_too():
    engine = FakeStuckEngine()
    loop = EngineLoop(engine)
    loop.start()
    computing = asyncio.ensure_future(loop.submit([1]))
    await asyncio.to_thread(engine.is_in_step.wait)
    asking, releasing = (asyncio.ensure_future(each) for each in (loop.ask(lambda _: 1), loop.release(["a"])))
    await asyncio.sleep(0)
    engine.may_fail.set()
    for waiting in (computing, asking, releasing):
        with pytest.raises(WorkerLost, match="thirteen"):
            await asyncio.wait_for(waiting, 5)
    await loop.close()


async def test_a_caller_whose_event_loop_has_closed_ends_nothing_for_others(loop):
    closed = asyncio.new_event_loop()
    closed.close()
    loop.post([(0, 1)], thread._Inbox(closed))
    assert await asyncio.wait_for(loop.submit([2]), 5) == [4]


async def test_a_closed_loop_turns_everybody_away():
    loop = EngineLoop(FakeEngine())
    loop.start()
    await loop.close()
    with pytest.raises(WorkerLost, match="closed"):
        await loop.submit([1])
    with pytest.raises(WorkerLost, match="closed"):
        await loop.release(["a"])


async def test_the_time_in_the_queue_counts_as_waiting():
    """The second call comes while the first one's step takes its time."""

    class Slow(FakeEngine):
        def step(self):
            time.sleep(0.05)
            ticket, request = self.waiting.pop(0)
            return [(ticket, Verdict(request, (), 0, 0, timing=Timing(1.0, 2.0, 3, 4)))]

    loop = EngineLoop(Slow())
    loop.start()
    first = asyncio.ensure_future(loop.submit([None]))
    await asyncio.sleep(0.02)
    second = (await loop.submit([None]))[0].timing
    assert 1.01 < second.waited_s < 1.5
    assert second == replace((await first)[0].timing, waited_s=second.waited_s)
    assert (second.computed_s, second.num_passes, second.num_rows) == (2.0, 3, 4)
    await loop.close()


class FakeGrowingEngine(FakeEngine):
    """Tells three times what has grown before each request's end."""

    def step(self):
        answers = [
            (ticket, DraftUpdate(STAMP, NewNodes(n), 0, Timing(0.0, 0.5, 1, 2)))
            for n in range(3)
            for ticket, _ in self.waiting
        ]
        answers += [(ticket, Refused(STAMP, f"{request} has ended")) for ticket, request in self.waiting]
        self.waiting.clear()
        return answers


STAMP = Stamp("a", 1, 1)


class FakeReceiver:
    def __init__(self):
        self.said, self.ends, self.waiting = [], [], []

    def take(self, replies):
        self.said += replies

    def working(self, numbers):
        self.waiting.append(list(numbers))

    def lose(self, end):
        self.ends.append(end)

    async def has_heard(self, num_replies):
        async with asyncio.timeout(10):
            while len(self.said) < num_replies:  # noqa: ASYNC110  it is told on another thread
                await asyncio.sleep(0.001)


async def test_what_grows_leaves_a_call_open_until_its_end():
    loop, receiver = EngineLoop(FakeGrowingEngine()), FakeReceiver()
    loop.start()
    loop.post([(7, "one"), (9, "two")], receiver)
    await receiver.has_heard(8)
    assert not loop._calls, "its end has ended it"
    for number, request in ((7, "one"), (9, "two")):
        *updates, end = [reply for each, reply in receiver.said if each == number]
        assert [reply.new_nodes.first for reply in updates] == [0, 1, 2]
        assert {reply.timing for reply in updates} == {Timing(0.0, 0.5, 1, 2)}, "a pass has not been in the queue"
        assert end == Refused(STAMP, f"{request} has ended")
    await loop.close()
    assert not receiver.ends


async def test_growth_that_is_open_when_the_engine_ends_is_lost():
    class Growing(FakeEngine):
        def step(self):
            time.sleep(0.001)
            return [(ticket, DraftUpdate(STAMP, NewNodes(0), 0)) for ticket, _ in self.waiting]

    loop, receiver = EngineLoop(Growing()), FakeReceiver()
    loop.start()
    loop.post([(7, "one")], receiver)
    await receiver.has_heard(3)
    await loop.close()
    assert [str(end) for end in receiver.ends] == ["the engine was closed"]


async def test_those_who_wait_for_many_steps_are_told_that_steps_are_made(monkeypatch):
    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 0.0)
    loop, receiver, other = EngineLoop(FakeEngine()), FakeReceiver(), FakeReceiver()
    busy = asyncio.ensure_future(loop.ask(lambda _: None))
    loop.post([(7, 1), (8, 2), (9, 3)], receiver)
    loop.post([(7, 4)], other)
    loop.start()
    await busy
    await receiver.has_heard(3)
    await other.has_heard(1)
    assert receiver.waiting == [[8, 9], [9]], "after each step those that are still open"
    assert other.waiting == [[7], [7], [7]]
    await loop.close()


async def test_those_who_wait_while_nothing_can_be_done_are_told_too(monkeypatch):
    """As where all of them wait for room in the KV: an engine that says nothing is taken for lost."""

    class Holding(FakeEngine):
        has_work = False

    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 0.001)
    loop, receiver = EngineLoop(Holding()), FakeReceiver()
    loop.post([(7, 1)], receiver)
    loop.start()
    async with asyncio.timeout(10):
        while len(receiver.waiting) < 3:  # noqa: ASYNC110  it is told on another thread
            await asyncio.sleep(0.001)
    assert receiver.waiting[:3] == [[7], [7], [7]]
    await loop.close()


async def test_they_are_told_once_in_a_while_alone(monkeypatch):
    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 3600.0)
    loop, receiver = EngineLoop(FakeEngine()), FakeReceiver()
    loop._told_s = time.monotonic()
    loop.post([(7, 1), (8, 2)], receiver)
    loop.start()
    await receiver.has_heard(2)
    assert receiver.waiting == []
    await loop.close()


async def test_an_engine_that_stands_still_tells_nobody_that_it_works(monkeypatch):
    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 0.0)
    engine, receiver = FakeStuckEngine(), FakeReceiver()
    loop = EngineLoop(engine)
    loop.start()
    loop.post([(7, 1)], receiver)
    assert await asyncio.to_thread(engine.is_in_step.wait, 10)
    await asyncio.sleep(0.05)
    assert receiver.waiting == []
    engine.may_fail.set()
    await loop.close()
