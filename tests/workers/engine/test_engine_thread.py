"""The loop: every caller is answered or told that the engine is lost; nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from core.errors import WorkerLost
from core.records import Base, Continuation, DraftUpdate, Missing, Refused, Stamp, Timing, Verdict, VerifyRequest
from core.speculation.growth import NewNodes
from core.speculation.token_tree import EMPTY_BLOCK
from tests.exchange import replies_of
from workers.engine import thread
from workers.engine.thread import EngineLoop


def asked(*rounds):
    """Messages of one session, of these rounds."""
    return [VerifyRequest(Stamp("s", 1, number), Base(0, 0), ()) for number in rounds]


async def doubles(loop, *rounds):
    """Replies of a `FakeEngine` to messages of these rounds."""
    return [verdict.next_token for verdict in await replies_of(loop, asked(*rounds))]


class FakeEngine:
    """Answers each message with the double of its round, one a step; fails on multiples of 13."""

    def __init__(self):
        self.waiting = []
        self.arrivals_s = {}
        self.released = []

    @property
    def has_work(self):
        return bool(self.waiting)

    def add(self, request, arrived_s=None):
        self.waiting.append(request.stamp)
        self.arrivals_s[request.stamp.round] = arrived_s

    def step(self):
        stamp = self.waiting.pop(0)
        if stamp.round % 13 == 0:
            raise RuntimeError("thirteen")
        return [Verdict(stamp, (), 2 * stamp.round, 0)]

    def build_more(self, *, is_idle):
        return False

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


async def test_each_batch_gets_its_own_replies(loop):
    batches = [[1, 2, 3], [4], [], [5, 6]]
    taken = [[] for _ in batches]
    await asyncio.gather(
        *(loop.exchange(asked(*batch), replies.append) for batch, replies in zip(batches, taken, strict=True))
    )
    assert [[verdict.next_token for verdict in replies] for replies in taken] == [[2, 4, 6], [8], [], [10, 12]]


async def test_each_reply_is_taken_after_its_step_on_the_callers_loop(loop):
    taken, thread = [], threading.get_ident()
    await loop.exchange(asked(1, 2), lambda reply: taken.append((reply.next_token, threading.get_ident())))
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
    await loop.exchange(asked(1, 2), lambda reply: (taken.append(reply.next_token), has_first.set()))
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
    assert await doubles(loop, 1) == [2], "a question that fails harms nobody else"


async def test_a_caller_that_is_cancelled_does_not_disturb_the_others(loop):
    cancelled = asyncio.ensure_future(doubles(loop, 1, 2))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await doubles(loop, 3) == [6]


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
        assert await doubles(loop, 1) == [2]
    assert not asked


async def test_an_engine_that_fails_is_lost_to_all_who_wait_and_to_all_who_come(loop):
    waiting = [asyncio.ensure_future(doubles(loop, *batch)) for batch in ([13], [1, 26], [7])]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(result, WorkerLost) for result in results)
    for result in results:
        assert isinstance(result, WorkerLost | list)
    with pytest.raises(WorkerLost, match="thirteen"):
        await doubles(loop, 1)


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
    computing = asyncio.ensure_future(doubles(loop, 1))
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
    loop.post(asked(1), thread._Inbox(closed))
    assert await asyncio.wait_for(doubles(loop, 2), 5) == [4]


async def test_a_closed_loop_turns_everybody_away():
    loop = EngineLoop(FakeEngine())
    loop.start()
    await loop.close()
    with pytest.raises(WorkerLost, match="closed"):
        await doubles(loop, 1)
    with pytest.raises(WorkerLost, match="closed"):
        await loop.release(["a"])


class FakeReceiver:
    def __init__(self):
        self.said, self.ends, self.waiting = [], [], []

    def take(self, replies):
        self.said += replies

    def working(self, stamps):
        self.waiting.append([stamp.round for stamp in stamps])

    def lose(self, end):
        self.ends.append(end)

    @property
    def rounds(self):
        """Rounds of the messages that it was told a reply to."""
        return [reply.stamp.round for reply in self.said]

    async def has_heard(self, num_replies):
        async with asyncio.timeout(10):
            while len(self.said) < num_replies:  # noqa: ASYNC110  it is told on another thread
                await asyncio.sleep(0.001)


async def test_a_wait_counts_from_the_order_but_that_of_an_offer_from_the_engine():
    loop, receiver = EngineLoop(engine := FakeEngine()), FakeReceiver()
    before_s = time.monotonic()
    loop.post([*asked(1), Continuation(Stamp("s", 1, 2), 1, EMPTY_BLOCK)], receiver)
    after_s = time.monotonic()
    loop.start()
    await receiver.has_heard(2)
    assert before_s <= engine.arrivals_s[1] <= after_s
    assert engine.arrivals_s[2] is None
    await loop.close()


async def test_each_reply_goes_to_the_receiver_of_the_message_with_its_stamp():
    class AtOnce(FakeEngine):
        """Answers all messages in one step, the last one first."""

        def step(self):
            replies = [Verdict(stamp, (), 0, 0) for stamp in reversed(self.waiting)]
            self.waiting.clear()
            return replies

    loop, receiver, other = EngineLoop(AtOnce()), FakeReceiver(), FakeReceiver()
    loop.post(asked(1, 4), receiver)
    loop.post(asked(2, 3), other)
    loop.start()
    await receiver.has_heard(2)
    await other.has_heard(2)
    assert (receiver.rounds, other.rounds) == ([4, 1], [3, 2])
    await loop.close()


async def test_a_message_that_comes_twice_while_it_is_open_is_answered_once():
    """Its sender gets the answer. Another caller that sends the same is refused. After its end it is the engine's
    affair."""
    loop, receiver, other = EngineLoop(FakeEngine()), FakeReceiver(), FakeReceiver()
    loop.post(asked(1, 2, 2), receiver)
    loop.post(asked(1), receiver)
    loop.post(asked(1, 3), other)
    loop.start()
    await receiver.has_heard(2)
    await other.has_heard(2)
    assert not await loop.ask(lambda engine: engine.waiting), "nothing else is to come"
    assert (receiver.rounds, other.rounds) == ([1, 2], [1, 3])
    assert other.said[0] == Refused(Stamp("s", 1, 1), "another caller has sent this message")
    assert not any(isinstance(reply, Refused) for reply in [*receiver.said, other.said[1]])
    loop.post(asked(1), other)
    await other.has_heard(3)
    assert (receiver.rounds, other.said[2].next_token) == ([1, 2], 2)
    await loop.close()


async def test_an_exchange_with_the_same_message_twice_ends():
    loop, taken = EngineLoop(FakeEngine()), []
    loop.start()
    await asyncio.wait_for(loop.exchange(asked(1, 1), taken.append), 10)
    assert len(taken) == 1
    await loop.close()


ENDS = [
    lambda stamp: Refused(stamp, "it has ended"),
    lambda stamp: Missing(stamp, 0),
    lambda stamp: DraftUpdate(stamp, NewNodes(3), 0, is_over=True),
]


class FakeGrowingEngine(FakeEngine):
    """Tells three times what has grown before each message's end."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def step(self):
        replies = [
            DraftUpdate(stamp, NewNodes(n), 0, Timing(0.0, 0.5, 1, 2)) for n in range(3) for stamp in self.waiting
        ]
        replies += map(self.end, self.waiting)
        self.waiting.clear()
        return replies


@pytest.mark.parametrize("end", ENDS, ids=["refused", "missing", "over"])
async def test_what_grows_leaves_a_message_open_until_its_end(end):
    loop, receiver = EngineLoop(FakeGrowingEngine(end)), FakeReceiver()
    loop.start()
    loop.post(asked(1, 2), receiver)
    await receiver.has_heard(8)
    assert not loop._open, "its end has ended it"
    for request in asked(1, 2):
        *updates, last = [reply for reply in receiver.said if reply.stamp == request.stamp]
        assert [reply.new_nodes.first for reply in updates] == [0, 1, 2]
        assert {reply.timing for reply in updates} == {Timing(0.0, 0.5, 1, 2)}
        assert last == end(request.stamp)
    await loop.close()
    assert not receiver.ends


@pytest.mark.parametrize("end", ENDS, ids=["refused", "missing", "over"])
async def test_an_exchange_takes_all_that_grows_and_returns_at_its_end(end):
    loop, taken = EngineLoop(FakeGrowingEngine(end)), []
    loop.start()
    async with asyncio.timeout(10):
        await loop.exchange(asked(1, 2), taken.append)
    assert [reply.stamp.round for reply in taken] == [1, 2] * 4
    assert taken[6:] == [end(request.stamp) for request in asked(1, 2)]
    await loop.close()


async def test_growth_that_is_open_when_the_engine_ends_is_lost():
    class Growing(FakeEngine):
        def step(self):
            time.sleep(0.001)
            return [DraftUpdate(stamp, NewNodes(0), 0) for stamp in self.waiting]

    loop, receiver = EngineLoop(Growing()), FakeReceiver()
    loop.start()
    loop.post(asked(1), receiver)
    await receiver.has_heard(3)
    await loop.close()
    assert [str(end) for end in receiver.ends] == ["the engine was closed"]


async def test_those_who_wait_for_many_steps_are_told_that_steps_are_made(monkeypatch):
    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 0.0)
    loop, receiver, other = EngineLoop(FakeEngine()), FakeReceiver(), FakeReceiver()
    busy = asyncio.ensure_future(loop.ask(lambda _: None))
    loop.post(asked(1, 2, 3), receiver)
    loop.post(asked(4), other)
    loop.start()
    await busy
    await receiver.has_heard(3)
    await other.has_heard(1)
    assert receiver.waiting == [[2, 3], [3]], "after each step those that are still open"
    assert other.waiting == [[4], [4], [4]]
    await loop.close()


async def test_those_who_wait_while_nothing_can_be_done_are_told_too(monkeypatch):
    """All of them may wait for room in the KV: an engine that says nothing is taken for lost."""

    class Holding(FakeEngine):
        has_work = False

    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 0.001)
    loop, receiver = EngineLoop(Holding()), FakeReceiver()
    loop.post(asked(1), receiver)
    loop.start()
    async with asyncio.timeout(10):
        while len(receiver.waiting) < 3:  # noqa: ASYNC110  it is told on another thread
            await asyncio.sleep(0.001)
    assert receiver.waiting[:3] == [[1], [1], [1]]
    await loop.close()


async def test_they_are_told_once_in_a_while_alone(monkeypatch):
    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 3600.0)
    loop, receiver = EngineLoop(FakeEngine()), FakeReceiver()
    loop._reported_s = time.monotonic()
    loop.post(asked(1, 2), receiver)
    loop.start()
    await receiver.has_heard(2)
    assert receiver.waiting == []
    await loop.close()


async def test_an_engine_that_stands_still_tells_nobody_that_it_works(monkeypatch):
    monkeypatch.setattr(thread, "WORKING_PERIOD_S", 0.0)
    engine, receiver = FakeStuckEngine(), FakeReceiver()
    loop = EngineLoop(engine)
    loop.start()
    loop.post(asked(1), receiver)
    assert await asyncio.to_thread(engine.is_in_step.wait, 10)
    await asyncio.sleep(0.05)
    assert receiver.waiting == []
    engine.may_fail.set()
    await loop.close()
