"""The queue for places, on a clock that stands still until it is told to go on."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Limits
from core.errors import DeadlinePassed, Overloaded, Unavailable
from core.records import GenerationRequest, Quota, Sampling
from orchestrator.admission import Admission

NO_QUOTA = Quota()


class HandClock:
    """Time that passes when a test says so."""

    def __init__(self):
        self._now_s = 0.0
        self._sleepers = []

    def now(self):
        return self._now_s

    async def sleep(self, duration_s):
        done = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now_s + duration_s, done))
        await done

    async def advance(self, duration_s):
        self._now_s += duration_s
        for end_s, done in self._sleepers:
            if end_s <= self._now_s and not done.done():
                done.set_result(None)
        await settled()


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def request(name, caller="", priority=0, deadline=None, max_tokens=10, prompt=(1,), quota=NO_QUOTA):
    fields = {"caller": caller, "priority": priority, "deadline": deadline, "quota": quota}
    return GenerationRequest(name, prompt, Sampling(), max_tokens, **fields)


class World:
    """Requests that hold their place until they are told to end."""

    def __init__(self, **limits):
        self.clock = HandClock()
        self.admission = Admission(Limits(**limits), self.clock)
        self.served = []
        self.places = {}
        self._ends = {}
        self._tasks = {}

    async def ask(self, name, num_samples=1, **fields):
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.ensure_future(self._hold([request(name, **fields)] * num_samples))
        await settled()

    async def _hold(self, asked):
        name = asked[0].request_id
        async with self.admission.places(asked) as self.places[name]:
            self.served.append(name)
            await self._ends[name].wait()

    async def end(self, name):
        self._ends[name].set()
        await settled()
        await self._tasks[name]

    async def cancel(self, name):
        self._tasks[name].cancel()
        await settled()
        assert self._tasks[name].cancelled()

    async def error(self, name):
        with pytest.raises(Exception) as caught:
            await self._tasks[name]
        return caught.value


async def test_who_finds_no_place_waits_and_is_served_in_order():
    world = World(max_sessions=1, max_queued=2)
    for name in "abc":
        await world.ask(name)
    assert world.served == ["a"]
    await world.end("a")
    assert world.served == ["a", "b"]
    await world.end("b")
    assert world.served == ["a", "b", "c"]


async def test_the_refusal_says_how_long_the_queue_takes():
    """Two places, each just taken for 6 s: with two waiting, the third would wait for 12 s."""
    world = World(max_sessions=2, max_queued=2)
    await world.ask("past")
    await world.clock.advance(6.0)
    await world.end("past")
    for name in "abcd":
        await world.ask(name)
    assert world.admission.report().num_waiting == world.admission.num_waiting == 2
    await world.ask("e")
    error = await world.error("e")
    assert isinstance(error, Overloaded)
    assert str(error) == ("all 2 places are taken and 2 requests wait for one; try again in 12 s, the expected wait")
    assert error.retry_after_s == pytest.approx(12.0)
    await world.clock.advance(4.0)
    assert world.admission.expected_wait_s == pytest.approx(8.0)


async def test_the_first_refusal_says_how_long_those_in_progress_will_take():
    """One of 11 tokens comes each second, and nothing has ended yet."""
    world = World(max_sessions=1, max_queued=0)
    await world.ask("a", max_tokens=12)
    await world.clock.advance(1.0)
    world.places["a"][0].num_tokens = 1
    await world.ask("b")
    assert (await world.error("b")).retry_after_s == pytest.approx(11.0)
    await world.clock.advance(10.0)
    world.places["a"][0].num_tokens = 11
    await world.ask("c")
    assert (await world.error("c")).retry_after_s == pytest.approx(1.0)


async def test_a_caller_that_has_its_share_is_told_when_a_place_of_its_own_is_free():
    world = World(max_sessions=4, max_queued=0, max_sessions_per_caller=2)
    for name, num_tokens in (("a", 1), ("b", 2)):
        await world.ask(name, caller="hog", max_tokens=10)
        world.places[name][0].num_tokens = num_tokens
    await world.clock.advance(4.0)
    await world.ask("c", caller="hog")
    assert (await world.error("c")).retry_after_s == pytest.approx(16.0)
    await world.ask("d", caller="hog", num_samples=2)
    assert (await world.error("d")).retry_after_s == pytest.approx(36.0)


async def test_what_a_full_house_would_promise_is_known_before_it_is_full():
    """Proxies refuse by it: in a burst nobody asks again."""
    world = World(max_sessions=2, max_queued=4)
    assert world.admission.full_wait_s == 0.0
    await world.ask("past")
    await world.clock.advance(5.0)
    await world.end("past")
    assert world.admission.expected_wait_s == 0.0
    assert world.admission.full_wait_s == pytest.approx(15.0)


async def test_without_a_queue_all_are_refused_that_find_no_place():
    world = World(max_sessions=1, max_queued=0, retry_after_s=2.5)
    await world.ask("a")
    await world.ask("b")
    error = await world.error("b")
    assert str(error) == "all 1 places are taken; try again in 2.5 s, the expected wait"
    await world.end("a")
    await world.ask("c")
    assert world.served == ["a", "c"]


async def test_a_lower_priority_number_is_served_first_and_refused_last():
    world = World(max_sessions=1, max_queued=2)
    await world.ask("running")
    await world.ask("late", priority=5)
    await world.ask("usual")
    await world.ask("urgent", priority=-1)
    assert isinstance(await world.error("late"), Overloaded)
    await world.ask("later", priority=7)
    assert isinstance(await world.error("later"), Overloaded)
    await world.end("running")
    await world.end("urgent")
    await world.end("usual")
    assert world.served == ["running", "urgent", "usual"]


async def test_a_caller_with_many_requests_delays_its_own():
    world = World(max_sessions=2, max_queued=4)
    for number in range(5):
        await world.ask(f"many{number}", caller="many")
    await world.ask("one", caller="one")
    await world.end("many0")
    assert world.served == ["many0", "many1", "one"]


async def test_a_caller_that_has_its_share_waits_and_others_pass_it():
    world = World(max_sessions=4, max_queued=4, max_sessions_per_caller=2)
    for name in ("a", "b", "c"):
        await world.ask(name, caller="hog")
    await world.ask("d", caller="other")
    assert world.served == ["a", "b", "d"], "a place is free, and not for who has two"
    await world.end("d")
    assert world.served == ["a", "b", "d"]
    await world.end("a")
    assert world.served == ["a", "b", "d", "c"]


async def test_a_key_sets_its_callers_own_share_and_a_refusal_says_how_much_that_is():
    world = World(max_sessions=4, max_queued=0, max_sessions_per_caller=1)
    for name in ("a", "b"):
        await world.ask(name, caller="big", quota=Quota(max_sessions=2))
    await world.ask("c", caller="big", quota=Quota(max_sessions=2))
    assert "this caller has 2 of the 2 places that it may have" in str(await world.error("c"))
    await world.ask("d", caller="small")
    await world.ask("e", caller="small")
    assert isinstance(await world.error("e"), Overloaded)
    for name in ("f", "g"):
        await world.ask(name, caller="free", quota=Quota(max_sessions=0))
    assert world.served == ["a", "b", "d", "f"]
    assert "all 4 places are taken" in str(await world.error("g"))


async def test_a_full_queue_has_room_for_a_caller_that_has_less():
    """The newest of the caller with most is refused for it; the same caller's next is refused itself."""
    world = World(max_sessions=1, max_queued=2)
    for number in range(3):
        await world.ask(f"many{number}", caller="many")
    await world.ask("one", caller="one")
    assert isinstance(await world.error("many2"), Overloaded)
    await world.ask("many3", caller="many")
    assert isinstance(await world.error("many3"), Overloaded)
    await world.end("many0")
    await world.end("many1")
    assert world.served == ["many0", "many1", "one"]


async def test_a_deadline_ends_the_wait():
    world = World(max_sessions=1)
    await world.ask("a")
    await world.ask("b", deadline=3.0)
    await world.ask("c", deadline=30.0)
    await world.clock.advance(4.0)
    assert isinstance(await world.error("b"), DeadlinePassed)
    await world.end("a")
    assert world.served == ["a", "c"]


async def test_a_call_that_is_cancelled_in_the_queue_leaves_it():
    world = World(max_sessions=1)
    await world.ask("a")
    await world.ask("b")
    await world.ask("c")
    await world.cancel("b")
    await world.end("a")
    assert world.served == ["a", "c"]


async def test_a_place_that_is_given_to_a_call_that_is_just_cancelled_goes_on():
    """Both in one turn of the loop, in either order: else a place would be lost for good."""
    for cancel_first in (True, False):
        world = World(max_sessions=1)
        await world.ask("a")
        await world.ask("b")
        await world.ask("c")
        steps = [world._tasks["b"].cancel, world._ends["a"].set]
        for step in steps if cancel_first else reversed(steps):
            step()
        await settled()
        assert world.served == ["a", "c"]
        await world.end("c")
        assert world.admission.num_admitted == 0


async def test_what_is_refused_for_want_of_a_place_counts_against_no_quota():
    world = World(max_sessions=1, max_queued=0, max_requests_per_minute=2)
    await world.ask("a")
    await world.ask("b")
    assert "places are taken" in str(await world.error("b"))
    await world.end("a")
    await world.ask("c")
    assert world.served == ["a", "c"]


async def test_those_who_wait_are_told_of_the_end():
    world = World(max_sessions=1)
    await world.ask("a")
    await world.ask("b")
    world.admission.refuse_waiting(Unavailable("shutting down"))
    assert isinstance(await world.error("b"), Unavailable)
    await world.end("a")
    assert world.admission.num_admitted == 0


async def test_the_report_tells_each_wait_once():
    world = World(max_sessions=1)
    await world.ask("a")
    await world.ask("b")
    await world.clock.advance(2.0)
    await world.end("a")
    assert world.admission.report().waited_s == (0.0, 2.0)
    assert world.admission.report().waited_s == ()


async def test_a_call_for_several_waits_for_all_its_places_and_nobody_passes_it():
    world = World(max_sessions=3, max_queued=4)
    await world.ask("a")
    await world.ask("b")
    await world.ask("both", num_samples=2)
    await world.ask("late")
    assert world.served == ["a", "b"], "a place is free, for the call that waits for two"
    assert world.admission.report().num_waiting == world.admission.num_waiting == 3
    await world.end("a")
    assert world.served == ["a", "b", "both"]
    assert world.admission.report().num_waiting == 1
    await world.end("b")
    assert world.served == ["a", "b", "both", "late"]


async def test_a_sample_that_ends_leaves_its_place_to_others():
    world = World(max_sessions=2, max_queued=2)
    await world.ask("both", num_samples=2)
    await world.ask("one")
    world.places["both"][1].leave(3)
    world.places["both"][1].leave(3)
    await settled()
    assert world.served == ["both", "one"]
    assert world.admission.num_admitted == 2


async def test_a_call_that_finds_no_room_for_all_its_samples_is_refused_whole():
    """And those who wait already stay, though each alone would give way to it."""
    world = World(max_sessions=2, max_queued=2, max_requests_per_minute=3)
    await world.ask("running", num_samples=2, caller="many")
    await world.ask("waiting", caller="many")
    await world.ask("large", num_samples=3, caller="one", priority=-1)
    told = str(await world.error("large"))
    assert told.startswith("all 2 places are taken and 1 requests wait for one; all 3 samples of a call start together")
    await world.ask("fits", num_samples=2, caller="one", priority=1)
    assert isinstance(await world.error("fits"), Overloaded)
    await world.ask("first", num_samples=2, caller="one")
    assert isinstance(await world.error("waiting"), Overloaded), "its caller has more"
    await world.cancel("first")
    await world.end("running")
    assert world.admission.num_admitted == 0


async def test_a_call_that_gives_up_lets_those_behind_it_in():
    world = World(max_sessions=2, max_queued=3)
    await world.ask("a")
    await world.ask("both", num_samples=2, deadline=3.0)
    await world.ask("b")
    assert world.served == ["a"]
    await world.clock.advance(4.0)
    assert isinstance(await world.error("both"), DeadlinePassed)
    assert world.served == ["a", "b"]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["ask", "end", "leave", "cancel", "time"]), st.integers(0, 17)), max_size=40),
    st.integers(0, 3),
)
def test_no_place_is_ever_lost_or_given_twice(steps, most):
    """However calls come, end and leave: at most three places are taken, no caller has more than it may, and nobody
    else waits for places that are free."""

    async def run():
        world, num = World(max_sessions=3, max_queued=4, max_sessions_per_caller=most), 0
        for step, index in steps:
            names = list(world._tasks)
            live = [name for name in names if not world._tasks[name].done()]
            if step == "ask":
                num += 1
                deadline, num_samples = world.clock.now() + 2 + index, 1 + index // 6
                await world.ask(f"{num}", num_samples, caller="xyz"[index % 3], deadline=deadline)
            elif step == "time":
                await world.clock.advance(1.0)
            elif live:
                name = live[index % len(live)]
                if step == "cancel":
                    world._tasks[name].cancel()
                elif name in world.served and step == "leave":
                    world.places[name][0].leave()
                elif name in world.served:
                    world._ends[name].set()
            await settled()
            running = [place for name in world.served for place in world.places[name] if not place._is_left]
            assert len(running) == world.admission.num_admitted <= 3
            assert not most or max(world.admission._running.values(), default=0) <= most
            first = world.admission._next()
            assert first is None or len(running) + first.num_places > 3
        for name in world._tasks:
            world._tasks[name].cancel()
        await asyncio.gather(*world._tasks.values(), return_exceptions=True)
        assert world.admission.num_admitted == 0

    asyncio.run(run())
