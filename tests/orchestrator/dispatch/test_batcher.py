"""Calls to one engine: how many at once, what goes together, and that each request is answered."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.config import DECODE_TOKENS
from core.errors import Unavailable, WorkerLost
from core.records import (
    Base,
    Continuation,
    DraftRequest,
    DraftUpdate,
    Missing,
    Stamp,
    VerifyRequest,
)
from core.speculation.growth import NewNodes, TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK
from orchestrator.dispatch.batcher import Batcher
from orchestrator.dispatch.engine_pool import EnginePool
from tests.orchestrator.dispatch.test_runner import settle


def message(name, num_tokens=1, *, is_first=False):
    return VerifyRequest(Stamp(name, 1, 1), Base(0 if is_first else 9, 0), (1,) * num_tokens)


def offer(name):
    return Continuation(Stamp(name, 1, 2), 1, EMPTY_BLOCK)


def reply(request):
    return Missing(request.stamp, 0)


class Engine:
    """Answers a call when it is told to."""

    def __init__(self):
        self.calls = []
        self.rounds = []
        """Session and round of each request, in the order in which they were sent."""
        self.most_at_once = 0
        self._num_running = 0
        self._answers = []
        self._takes = []
        self.delivered = {}
        self.goes_on_with = None
        """Where each session puts its next request as soon as it has a reply."""

    async def call(self, batch, take):
        self.calls.append([request.stamp.lease for request in batch])
        self.rounds += [(request.stamp.lease, request.stamp.round) for request in batch]
        self._takes.append(take)
        self._answers.append(asyncio.get_running_loop().create_future())
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            for each in await self._answers[-1] or [reply(request) for request in batch]:
                if each not in self.delivered.values():
                    take(each)
        finally:
            self._num_running -= 1

    def deliver(self, request, answer):
        if self.goes_on_with is not None:
            self.goes_on_with.put(message(request.stamp.lease))
            return
        assert request.stamp.lease not in self.delivered, "answered twice"
        self.delivered[request.stamp.lease] = answer

    async def answer(self, index, replies=None):
        if isinstance(replies, Exception):
            self._answers[index].set_exception(replies)
        else:
            self._answers[index].set_result(replies)
        await settle()

    async def step(self, *answered):
        """A step of the engine whose replies come in one frame: each with the number of its call."""
        for index, name in answered:
            self._takes[index](reply(message(name)))
        await settle()


@pytest.fixture
def engine():
    return Engine()


def put(batcher, names):
    for name in names:
        batcher.put(message(name))


async def test_what_is_ready_together_goes_together_and_the_rest_with_the_next_call(engine):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "abc")
    await settle()
    put(batcher, "de")
    await settle()
    assert engine.calls == [["a", "b", "c"]]
    await engine.answer(0)
    assert engine.calls == [["a", "b", "c"], ["d", "e"]]
    assert set(engine.delivered) == set("abc")
    await engine.answer(1)
    assert set(engine.delivered) == set("abcde")
    put(batcher, "f")
    await settle()
    assert engine.calls[2:] == [["f"]], "and so on after a pause"
    await engine.answer(2)


async def test_what_is_of_use_only_until_a_verdict_waits_for_no_other_call(engine):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "ab")
    await settle()
    put(batcher, "c")
    batcher.put(offer("d"))
    await settle()
    assert engine.calls == [["a", "b"], ["d"]]
    await engine.answer(1)
    assert set(engine.delivered) == {"d"}
    await engine.answer(0)
    await engine.answer(2)
    assert set(engine.delivered) == set("abcd")


@pytest.mark.parametrize("max_calls", [1, 2, 3])
async def test_no_more_calls_are_in_flight_than_allowed(engine, max_calls):
    batcher = Batcher(engine.call, engine.deliver, max_calls)
    for name in "abcdef":
        put(batcher, name)
        await settle()
    assert engine.most_at_once == len(engine.calls) == max_calls
    for index in range(max_calls + 1):
        await engine.answer(index)
    assert engine.most_at_once == max_calls
    assert set(engine.delivered) == set("abcdef")
    assert sorted(name for call in engine.calls for name in call) == list("abcdef")


async def test_calls_that_have_ended_make_room_for_as_many_others(engine):
    batcher = Batcher(engine.call, engine.deliver, max_calls=2)
    for index in range(5):
        put(batcher, str(index))
        await settle()
        await engine.answer(index)
    for name in "ab":
        put(batcher, name)
        await settle()
    assert engine.calls[5:] == [["a"], ["b"]]
    for index in (5, 6):
        await engine.answer(index)


async def test_a_prompt_goes_by_itself_at_once_and_takes_nobodys_place(engine):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "a")
    await settle()
    batcher.put(message("prompt", DECODE_TOKENS + 1))
    batcher.put(message("as short as can be", DECODE_TOKENS))
    await settle()
    assert engine.calls == [["a"], ["prompt"]]
    await engine.answer(1)
    assert set(engine.delivered) == {"prompt"}
    assert len(engine.calls) == 2
    await engine.answer(0)
    assert engine.calls[2] == ["as short as can be"]
    await engine.answer(2)


async def test_first_messages_go_by_themselves_however_short(engine):
    """The engine may let them wait for room in its KV, which sessions of the other call have to make."""
    batcher = Batcher(engine.call, engine.deliver)
    for name, is_first in (("a", False), ("new", True), ("b", False), ("newer", True)):
        batcher.put(message(name, is_first=is_first))
    await settle()
    assert sorted(engine.calls) == [["a", "b"], ["new"], ["newer"]]
    await engine.answer(engine.calls.index(["a", "b"]))
    assert set(engine.delivered) == {"a", "b"}
    for name in ("new", "newer"):
        await engine.answer(engine.calls.index([name]))


async def test_who_needs_more_passes_than_others_of_a_call_delays_nobody(engine):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "abc")
    await settle()
    put(batcher, "d")
    await engine.step((0, "a"), (0, "b"))
    assert set(engine.delivered) == set("ab"), "c is still computed"
    assert engine.calls == [["a", "b", "c"], ["d"]]
    await engine.answer(0)
    assert set(engine.delivered) == set("abc"), "each of them once"


async def test_whoever_is_late_shares_the_others_next_pass_again(engine):
    """Else two half batches would take turns, each waiting for the other's pass."""
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "abc")
    await settle()
    engine.goes_on_with = batcher
    await engine.step((0, "a"), (0, "b"))
    assert engine.calls[1:] == [["a", "b"]]
    await engine.step((0, "c"))
    assert engine.calls[2:] == [], "it is ready while the others' pass is under way"
    await engine.step((1, "a"), (1, "b"))
    assert engine.calls[2:] == [["c", "a", "b"]]


async def test_replies_of_one_step_to_several_calls_lead_to_one_call(engine):
    batcher = Batcher(engine.call, engine.deliver)
    batcher.put(message("p", DECODE_TOKENS + 1))
    put(batcher, "ab")
    await settle()
    engine.goes_on_with = batcher
    await engine.step((1, "a"), (1, "b"), (0, "p"))
    assert engine.calls == [["p"], ["a", "b"], ["a", "b", "p"]]


@pytest.mark.parametrize("wrong", ["another session's", "the same twice"])
async def test_a_reply_that_answers_none_of_a_calls_open_requests_loses_the_engine_for_those(engine, wrong):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "abc")
    await settle()
    await engine.step((0, "a"))
    with pytest.raises(WorkerLost) as lost:
        await engine.step((0, "x" if wrong == "another session's" else "a"))
    await engine.answer(0, lost.value)
    assert engine.delivered["a"] == reply(message("a")), "it is well"
    assert all(isinstance(engine.delivered[name], WorkerLost) for name in "bc")


WRONG = {
    "it died": (WorkerLost("it died"), "abc"),
    "something else": (RuntimeError("boom"), "abc"),
    "too few": ([reply(message(name)) for name in "ab"], "c"),
    "others'": ([reply(message(name)) for name in "xyz"], "abc"),
}
"""The error that a call ends with, and the requests that have lost the engine with it."""


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_call_that_fails_or_ends_too_soon_loses_the_engine_for_its_open_requests(engine, wrong):
    replies, lost = WRONG[wrong]
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "abc")
    await settle()
    put(batcher, "d")
    await engine.answer(0, replies)
    assert sorted(engine.delivered) == list("abc")
    assert [name for name in "abc" if isinstance(engine.delivered[name], WorkerLost)] == list(lost)
    assert engine.calls[1:] == [["d"]], "the next call is made"
    await engine.answer(1)
    assert engine.delivered["d"] == reply(message("d"))


async def test_replies_to_joint_requests_of_a_call_come_together_and_all_others_at_once(engine):
    batcher = Batcher(engine.call, engine.deliver, None, lambda request: request.stamp.lease in "ab")
    put(batcher, "abc")
    await settle()
    await engine.step((0, "a"), (0, "c"))
    assert set(engine.delivered) == {"c"}
    await engine.step((0, "b"))
    assert set(engine.delivered) == {"a", "b", "c"}


async def test_an_update_that_does_not_end_a_joint_request_is_delivered_at_once(engine):
    """Else an engine that answers a block with two updates would cost all blocks of the call."""
    seen = []
    batcher = Batcher(engine.call, lambda _, reply: seen.append(reply), None, lambda _: True)
    put(batcher, "ab")
    await settle()
    update = DraftUpdate(message("a").stamp, NewNodes(0), 1)
    engine._takes[0](update)
    assert seen == [update]
    await engine.step((0, "a"), (0, "b"))
    assert seen == [update, reply(message("a")), reply(message("b"))]


async def test_joint_replies_that_were_held_back_when_their_call_fails_are_lost_like_the_rest(engine):
    batcher = Batcher(engine.call, engine.deliver, None, lambda _: True)
    put(batcher, "ab")
    await settle()
    await engine.step((0, "a"))
    await engine.answer(0, WorkerLost("it died"))
    assert all(isinstance(engine.delivered[name], WorkerLost) for name in "ab")


class Lease:
    def __init__(self, name, port, engine_id="engine"):
        self.name, self.port, self.engine_id = name, port, engine_id
        self.is_released = False

    def release(self):
        self.is_released = True


class Port:
    def __init__(self, engine):
        self.exchange = engine.call
        self.released = []
        self.failure = None

    async def release(self, names):
        if self.failure is not None:
            raise self.failure
        self.released += names


@pytest.fixture
def port(engine):
    return Port(engine)


@pytest.fixture
def side(engine, port):
    numbers = iter(range(100))

    async def take(session, tokens):
        return Lease(f"{session}-{next(numbers)}-{len(tokens)}", port, "other" if session == "other" else "engine")

    return EnginePool(take, engine.deliver, max_calls=1)


async def test_an_engine_is_spoken_to_by_one_gatherer_until_the_last_lease_on_it_is_given_back(engine, side, port):
    first, second = await side.take("a", (1, 2)), await side.take("b", ())
    assert (first.name, second.name) == ("a-0-2", "b-1-0")
    assert side.num_engines == 0, "nothing was said yet"
    side.calls_to(first).put(message("a"))
    await settle()
    side.give_back(first)
    side.calls_to(second).put(message("b"))
    await settle()
    assert engine.calls == [["a"]], "one call at a time, whoever has left meanwhile"
    assert side.num_engines == 1
    await engine.answer(0)
    await engine.answer(1)
    side.give_back(second)
    assert side.num_engines == 0
    await side.drain()
    assert port.released == [first.name, second.name]
    assert first.is_released
    assert second.is_released


async def test_engines_are_counted_not_their_gatherers(engine, side):
    leases = [await side.take(name, ()) for name in ("a", "other")]
    for lease in leases:
        side.calls_to(lease).put(message(lease.name))
    prompt = DraftRequest(Stamp("long", 1, 1), Base(0, 0), (1,) * (DECODE_TOKENS + 1), TreeSpec.chain(1))
    side.calls_to(leases[0]).put(prompt)
    assert side.num_engines == 2
    await settle()
    for index in range(3):
        await engine.answer(index)
    for lease in leases:
        side.give_back(lease)
    assert side.num_engines == 0
    await side.drain()


async def test_whoever_drains_waits_until_all_is_free_and_a_dead_engine_holds_nobody_up(side, port):
    freed = asyncio.Event()
    release = port.release

    async def slow(names):
        await freed.wait()
        await release(names)

    port.release = slow
    for name in "ab":
        side.give_back(await side.take(name, ()))
    draining = asyncio.ensure_future(side.drain())
    await settle()
    assert not draining.done()
    port.failure = WorkerLost("gone")
    freed.set()
    await draining


async def test_whatever_goes_wrong_with_a_lease_is_unavailable_and_takes_no_place(engine, port):
    problems = [WorkerLost("the replica died"), RuntimeError("secret")]

    async def take(session, tokens):
        raise problems.pop(0)

    side = EnginePool(take, engine.deliver, max_calls=1)
    with pytest.raises(Unavailable, match="the replica died"):
        await side.take("a", ())
    with pytest.raises(Unavailable, match=r"^no engine could be reached; try again$"):
        await side.take("a", ())
    assert side.num_engines == 0


async def test_an_offer_does_not_overtake_the_message_that_it_goes_on_from(engine):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "a")
    await settle()
    put(batcher, "b")
    batcher.put(offer("b"))
    await settle()
    assert engine.calls == [["a"]], "b waits for the call of a, and its offer for b"
    await engine.answer(0)
    assert engine.calls == [["a"], ["b"], ["b"]]
    assert [len(call) for call in engine.calls] == [1, 1, 1]


async def test_what_a_pass_leads_to_is_offered_in_one_call(engine):
    batcher = Batcher(engine.call, engine.deliver)
    for name in "abc":
        batcher.put(offer(name))
    await settle()
    batcher.put(offer("d"))
    await settle()
    assert engine.calls == [["a", "b", "c"], ["d"]]
    await engine.answer(0)
    await engine.answer(1)
    assert set(engine.delivered) == set("abcd")


async def test_offers_wait_for_their_own_message_and_for_no_other(engine):
    batcher = Batcher(engine.call, engine.deliver)
    put(batcher, "a")
    await settle()
    put(batcher, "b")
    for name in "bc":
        batcher.put(offer(name))
    await settle()
    assert engine.calls == [["a"], ["c"]]
    await engine.answer(0)
    assert engine.calls == [["a"], ["c"], ["b"], ["b"]]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("num_tokens", [1, DECODE_TOKENS + 1])
@pytest.mark.parametrize("num_turns", range(3))
async def test_messages_of_a_session_keep_their_order(engine, is_first, num_tokens, num_turns):
    """Whichever is sent alone, and however far a call for others has been gathered."""
    batcher = Batcher(engine.call, engine.deliver, max_calls=None)
    put(batcher, "x")
    for _ in range(num_turns):
        await asyncio.sleep(0)
    batcher.put(message("first", num_tokens, is_first=is_first))
    batcher.put(replace(message("second"), stamp=Stamp("first", 1, 2)))
    batcher.put(replace(message("third", num_tokens), stamp=Stamp("first", 1, 3)))
    batcher.put(Continuation(Stamp("first", 1, 4), 3, EMPTY_BLOCK))
    await settle()
    assert [each for each in engine.rounds if each[0] == "first"] == [("first", number) for number in range(1, 5)]
