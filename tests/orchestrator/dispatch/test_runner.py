"""Rounds over ports: batches follow the load, time is kept, and whatever ends a session gives everything back."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from functools import partial

import pytest

from core.config import (
    DECODE_TOKENS,
    DraftConfig,
    EngineConfig,
    Limits,
    ServiceConfig,
    SpeculationConfig,
    TargetConfig,
)
from core.errors import DeadlinePassed, OutriderError, Overloaded, Unavailable, WorkerLost, WorkerStopping
from core.records import Call, Refused
from orchestrator.policy.policy import RoundOutcome
from orchestrator.service import Service
from orchestrator.session import Session
from tests.orchestrator.fakes import (
    FakeDraftEngine,
    FakePolicies,
    FakeTargetEngine,
    FakeTokenizer,
    model_info,
    plain,
    request,
)

TARGET, DRAFT = TargetConfig(EngineConfig("m")), DraftConfig(EngineConfig("m"))


class FakePort:
    """Answers by a fake engine, after it has been let through `gate`."""

    def __init__(self, engine):
        self.engine = engine
        self.answer = engine.verify if isinstance(engine, FakeTargetEngine) else engine.draft
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches = []
        self.failure = None
        self.ended = set()

    async def exchange(self, batch, take):
        self.batches.append([item.stamp.lease for item in batch])
        await asyncio.sleep(0)  # as every real call does, so that clients are woken between rounds
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        for item in batch:
            take(Refused(item.stamp, "over") if item.stamp.lease in self.ended else self.answer(item))

    async def release(self, sessions):
        for session in sessions:
            self.ended.add(session)
            self.engine.forget(session)


class FakeLease:
    def __init__(self, name, port, held):
        self.name, self.port, self._held = name, port, held
        self.engine_id, self.epoch = f"engine {id(port)}", port.engine.epoch
        held.add(name)

    def release(self):
        self._held.discard(self.name)


class FakeLeases:
    def __init__(self):
        self.target, self.draft = FakePort(FakeTargetEngine()), FakePort(FakeDraftEngine())
        self.held = set()
        self.num_taken = 0
        self.asked = []
        self.refusal = None

    async def take_target(self, session, tokens=(), adapter=None):
        self.asked.append(("target", session, tuple(tokens), *([adapter] if adapter else [])))
        await asyncio.sleep(0)
        return self._take(self.target)

    async def take_draft(self, session, tokens=(), draft=0):
        self.asked.append(("draft", session, tuple(tokens)))
        await asyncio.sleep(0)
        return self._take(self.draft)

    def _take(self, port):
        if self.refusal is not None:
            raise self.refusal
        self.num_taken += 1
        return FakeLease(f"lease {self.num_taken}", port, self.held)


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self):
        self._now = 100.0
        self._sleepers = []

    def now(self):
        return self._now

    async def sleep(self, duration_s):
        if duration_s <= 0:
            return
        waker = asyncio.Event()
        self._sleepers.append((self._now + duration_s, waker))
        await waker.wait()

    async def advance(self, duration_s):
        self._now += duration_s
        for due, waker in self._sleepers:
            if due <= self._now:
                waker.set()
        for _ in range(50):
            await asyncio.sleep(0)


class World:
    def __init__(self, **limits):
        self.leases, self.clock = FakeLeases(), FakeClock()
        config = ServiceConfig(TARGET, DRAFT, speculation=SpeculationConfig(), limits=Limits(**limits))
        models = (model_info(), model_info("draft"))
        self.service = Service(config, *models, FakeTokenizer(), self.leases, self.clock, FakePolicies())

    async def tokens(self, job):
        return [token async for chunk in self.service.generate(job) for token in chunk.token_ids]

    async def check_nothing_is_held(self):
        """Before the service is closed, which would give back what a stream has forgotten to; and after it."""
        await settle()
        self._check_all_is_free()
        await self.service.close()
        self._check_all_is_free()

    def _check_all_is_free(self):
        assert self.service.num_sessions == self.service.num_drafted == 0
        assert self.service._runner.num_engines == 0
        assert self.service._runner._leased == {}
        assert self.leases.held == set()
        assert self.leases.target.engine.logs == self.leases.draft.engine.logs == {}
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture
async def world():
    return World()


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


async def test_many_streams_share_calls_and_each_gets_its_own_tokens(world):
    jobs = [request((n, 3), 20) for n in range(1, 17)]
    assert await asyncio.gather(*map(world.tokens, jobs)) == [plain((n, 3), 20) for n in range(1, 17)]
    sizes = [len(batch) for batch in world.leases.target.batches]
    assert max(sizes) == 16
    assert sum(sizes) / len(sizes) > 4
    await world.check_nothing_is_held()


async def test_first_messages_go_by_themselves_and_what_is_ready_together_shares_the_next_call(world):
    world.leases.target.gate.clear()
    jobs = [asyncio.ensure_future(world.tokens(request((n,), 3))) for n in (1, 2, 3)]
    await settle()
    batches = world.leases.target.batches
    assert [len(batch) for batch in batches] == [1] * 3, "an engine may let a first message wait"
    world.leases.target.gate.set()
    await asyncio.gather(*jobs)
    assert sorted(batches[3]) == sorted(batches[4]) == sorted(first for (first,) in batches[:3])
    await world.check_nothing_is_held()


async def test_a_long_prompt_goes_by_itself_and_holds_nobody_up(world):
    first = asyncio.ensure_future(world.tokens(request((1,), 200)))
    await settle()
    assert await world.tokens(request(tuple(range(1, 41)), 2)) == plain(range(1, 41), 2)
    others = [batch for batch in world.leases.target.batches if batch != ["lease 1"]]
    assert others[0] == ["lease 3"], "the long prompt shares its call with nobody"
    assert await first == plain((1,), 200)


async def test_a_draft_that_is_still_prefilling_is_not_waited_for(world):
    world.leases.draft.gate.clear()
    prompt = (1,) * (DECODE_TOKENS + 1)
    assert await world.tokens(request(prompt, 10)) == plain(prompt, 10)


async def test_a_late_block_is_waited_for_until_its_time_is_up(world):
    chunks = world.service.generate(request((1,), 60))
    while len((await anext(chunks)).token_ids) < 2:
        pass
    world.leases.draft.gate.clear()
    rest = asyncio.ensure_future(_rest(chunks))
    await settle()
    num_passes = len(world.leases.target.batches)
    await settle()
    assert len(world.leases.target.batches) == num_passes, "it waits for the block"
    await world.clock.advance(2.5)
    assert len(world.leases.target.batches) > num_passes, "and then no longer"
    world.leases.draft.gate.set()
    assert (await rest)[-1].stats.num_draft_failures == 2, "a block was late, and after three rounds the lease is lost"


async def _rest(chunks):
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize("when", ["leasing", "prefilling", "streaming"])
async def test_a_client_that_goes_away_leaves_nothing_behind(world, when):
    if when == "prefilling":
        world.leases.target.gate.clear()
    stream = asyncio.ensure_future(world.tokens(request((1,), 1000)))
    if when != "leasing":
        await settle()
    else:
        await asyncio.sleep(0)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    world.leases.target.gate.set()
    await settle()
    await world.check_nothing_is_held()


async def test_a_deadline_ends_the_stream_and_frees_everything(world):
    world.leases.target.gate.clear()
    stream = asyncio.ensure_future(world.tokens(request((1,), 10, deadline=105.0)))
    await settle()
    await world.clock.advance(4.9)
    assert not stream.done()
    await world.clock.advance(0.1)
    with pytest.raises(DeadlinePassed):
        await stream
    world.leases.target.gate.set()
    await settle()
    await world.check_nothing_is_held()
    with pytest.raises(DeadlinePassed):
        await World().tokens(request((1,), 10, deadline=99.0))


async def _ended_by_its_deadline(world):
    stream = asyncio.ensure_future(world.tokens(request((1,), 10, deadline=105.0)))
    await settle()
    await world.clock.advance(5.0)
    assert isinstance(stream.exception(), DeadlinePassed)  # raised here, its traceback would hold this frame


def _num_tracked(kind):
    return sum(type(each) is kind for each in gc.get_objects())


async def test_a_session_that_an_error_has_ended_is_freed_without_a_garbage_collection(world):
    world.leases.target.gate.clear()
    gc.collect()
    gc.disable()
    try:
        before = _num_tracked(Session)
        await _ended_by_its_deadline(world)
        world.leases.target.gate.set()
        await settle()
        assert _num_tracked(Session) == before
    finally:
        gc.enable()


async def test_the_next_session_is_refused_at_once_when_all_places_are_taken():
    world = World(max_sessions=2, max_queued=0)
    world.leases.target.gate.clear()
    streams = [asyncio.ensure_future(world.tokens(request((n,), 5))) for n in (1, 2)]
    await settle()
    with pytest.raises(Overloaded, match="2 places") as caught:
        await world.tokens(request((3,), 5))
    assert caught.value.retry_after_s == 1.0
    world.leases.target.gate.set()
    await asyncio.gather(*streams)
    assert await world.tokens(request((3,), 5)) == plain((3,), 5)


async def test_an_engine_that_is_lost_takes_its_batch_along_to_the_next(world):
    streams = [asyncio.ensure_future(world.tokens(request((n,), 40))) for n in (1, 2, 3)]
    await settle()
    dead, world.leases.target = world.leases.target, FakePort(FakeTargetEngine(epoch=2))
    dead.failure = WorkerLost("it died")
    await settle()
    for _ in range(6):
        await world.clock.advance(1.0)
    assert await asyncio.gather(*streams) == [plain((n,), 40) for n in (1, 2, 3)]
    await world.check_nothing_is_held()


async def test_leases_are_asked_for_by_the_sessions_name_and_its_text_so_far(world):
    """The text decides which replica knows its beginning already."""
    stream = world.service.generate(request((1, 2), 40))
    text = [1, 2, *(await anext(stream)).token_ids]
    session = "r#1"
    assert world.leases.asked == [("target", session, (1, 2)), ("draft", session, (1, 2))]
    dead, world.leases.target = world.leases.target, FakePort(FakeTargetEngine(epoch=2))
    dead.failure = WorkerLost("it died")
    rest = asyncio.ensure_future(_rest(stream))
    await settle()
    await world.clock.advance(1.0)
    await rest
    kind, name, tokens = world.leases.asked[2]
    assert (kind, name) == ("target", session)
    assert tokens[: len(text)] == tuple(text)
    assert tokens == (1, 2, *plain((1, 2), 40))[: len(tokens)]


async def test_a_target_that_is_to_stop_is_left_without_counting_as_a_failure(world):
    for failure, num_failures in ((WorkerStopping("it is to stop"), 0), (WorkerLost("it died"), 1)):
        stream = world.service.generate(request((1,), 40))
        await anext(stream)
        left, world.leases.target = world.leases.target, FakePort(FakeTargetEngine())
        left.failure = failure
        rest = asyncio.ensure_future(_rest(stream))
        await settle()
        await world.clock.advance(1.0)
        assert (await rest)[-1].stats.num_target_failures == num_failures


@pytest.mark.parametrize("side", ["target", "draft"])
async def test_another_engine_is_asked_for_after_a_pause_and_not_before(world, side):
    """The stream waits for a target; without its draft it goes on, and is over before that is asked for again."""
    stream = world.service.generate(request((1,), 60))
    while len((await anext(stream)).token_ids) < 2:
        pass
    getattr(world.leases, side).failure = WorkerLost("it died")
    rest = asyncio.ensure_future(_rest(stream))
    await settle()
    await world.clock.advance(0.05)
    assert [kind for kind, *_ in world.leases.asked] == ["target", "draft"]
    getattr(world.leases, side).failure = None
    await world.clock.advance(1.0)
    await rest
    assert [kind for kind, *_ in world.leases.asked][2:] == ["target"] * (side == "target")


async def test_sessions_that_hold_a_draft_are_counted(world):
    streams = [world.service.generate(request((n,), 40)) for n in (1, 2)]
    for stream in streams:
        await anext(stream)
    assert (world.service.num_sessions, world.service.num_drafted) == (2, 2)
    await streams[0].aclose()
    assert (world.service.num_sessions, world.service.num_drafted) == (1, 1)
    plain_one = world.service.generate(request((3,), 40, max_draft_tokens=0))
    await anext(plain_one)
    assert (world.service.num_sessions, world.service.num_drafted) == (2, 1)
    for stream in (streams[1], plain_one):
        await stream.aclose()
    await world.check_nothing_is_held()


async def test_calls_are_timed_by_the_clock_from_the_beginning_of_the_stream(world):
    """A target that takes a second for a call, and a draft that takes a quarter of one."""
    for port, takes_s in ((world.leases.target, 1.0), (world.leases.draft, 0.25)):
        port.exchange = slowed(world.clock, port.exchange, takes_s)
    chunks = await _rest(world.service.generate(request((1,), 12, wants_trace=True)))
    calls = [call for chunk in chunks for call in chunk.trace]
    assert min(call.sent_s for call in calls) == 0.0
    for call in calls:
        alone_s = 1.0 if call.call is Call.VERIFY else 0.25
        assert call.received_s - call.sent_s in (alone_s, 1.25), "or what the other one took, too"
    assert [call.sent_s for call in calls if call.call is Call.VERIFY][1] >= 1.0
    alone = [call for call in calls if call.call is Call.BLOCK]
    assert alone
    assert {call.received_s - call.sent_s for call in alone} == {0.25}, "the target waits for these"
    policies = world.service._policies.made
    rounds = [seen for seen in policies[0].seen if isinstance(seen, RoundOutcome)]
    assert [seen.elapsed_s for seen in rounds] == [c.received_s - c.sent_s for c in calls if c.call is Call.VERIFY]


def slowed(clock, exchange, takes_s):
    async def slow(batch, take):
        replies = []
        await exchange(batch, replies.append)
        clock._now += takes_s
        for reply in replies:
            take(reply)

    return slow


async def test_without_a_target_the_client_is_told_so(world):
    world.leases.refusal = Unavailable("no target granted a lease")
    with pytest.raises(Unavailable, match="no target"):
        await world.tokens(request((1,), 5))
    await world.check_nothing_is_held()


async def test_a_defect_in_one_session_ends_that_session_alone(world, caplog):
    neighbour = asyncio.ensure_future(world.tokens(request((1,), 40)))
    broken = world.service.generate(request((2,), 40))
    await anext(broken)
    running = next(r for r in world.service._runner._running.values() if r.session.id.endswith("#1"))
    running.session.handle = lambda event: 1 // 0
    with pytest.raises(OutriderError, match="internal error"):
        await _rest(broken)
    assert "ZeroDivisionError" in caplog.text
    assert await neighbour == plain((1,), 40)
    await world.check_nothing_is_held()
    assert running.session._policy.is_closed, "what it shares with others is let go of"


async def test_a_service_that_closes_takes_no_more(world):
    await world.service.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await world.tokens(request((1,), 5))


async def test_a_service_that_winds_down_ends_what_it_has_begun(world):
    stream = world.service.generate(request((1,), 40))
    first = await anext(stream)
    assert world.service.wind_down() == 1
    with pytest.raises(Unavailable, match="shutting down"):
        await world.tokens(request((2,), 5))
    rest = [token for chunk in await _rest(stream) for token in chunk.token_ids]
    assert [*first.token_ids, *rest] == plain((1,), 40)
    assert world.service.wind_down() == 0


async def test_a_stream_whose_last_piece_nobody_has_taken_yet_is_in_progress(world):
    stream = world.service.generate(request((1,), 5))
    await anext(stream)
    while world.service.num_sessions:
        await settle()
    assert world.service.wind_down() == 1
    await _rest(stream)
    assert world.service.wind_down() == 0


async def test_what_the_target_s_passes_cost_is_known_before_the_first_request(world):
    target = replace(model_info(), step_times_s=((1, 0.25), (8, 0.5)))
    service = Service(ServiceConfig(TARGET, DRAFT), target, None, FakeTokenizer(), world.leases, world.clock)
    known = service.report().verify_s
    assert (known[1], known[8]) == (0.25, 0.5)


async def test_a_draft_that_comes_later_is_used_from_then_on(world):
    speculation = SpeculationConfig(policy="static", pipelining=False, guessers=("draft",))
    config = ServiceConfig(TARGET, DRAFT, speculation=speculation)
    service = Service(config, model_info(), None, FakeTokenizer(), world.leases, world.clock)
    assert (await _rest(service.generate(request((1,), 9))))[-1].stats.num_drafted_tokens == 0
    service.use_draft(model_info("draft"))
    assert (await _rest(service.generate(request((1,), 9))))[-1].stats.num_drafted_tokens > 0


class FakeOutage(Exception):
    """Something that no port should raise."""


FAULTS = {
    "raises": lambda replies: (_ for _ in ()).throw(FakeOutage()),
    "is cancelled": lambda replies: (_ for _ in ()).throw(asyncio.CancelledError()),
    "answers too little": lambda replies: replies[:-1],
    "answers somebody else": lambda replies: [
        replace(reply, stamp=replace(reply.stamp, round=-1)) for reply in replies
    ],
}


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_call_that_fails_in_any_way_leaves_nobody_waiting(world, side, fault):
    """Once, in the middle of three streams: they go on, elsewhere or without guesses, and say what is right."""
    port = getattr(world.leases, side)
    exchange, num_calls = port.exchange, 0

    async def faulty(batch, take):
        nonlocal num_calls
        num_calls += 1
        is_faulty, replies = num_calls == 4, []
        await exchange(batch, replies.append)
        for reply in FAULTS[fault](replies) if is_faulty else replies:
            take(reply)

    port.exchange = faulty
    streams = [asyncio.ensure_future(world.tokens(request((n,), 40))) for n in (1, 2, 3)]
    for _ in range(8):
        await settle()
        await world.clock.advance(1.0)
    assert await asyncio.wait_for(asyncio.gather(*streams), 5) == [plain((n,), 40) for n in (1, 2, 3)]
    await settle()
    await world.check_nothing_is_held()


async def test_a_lease_that_cannot_be_taken_for_an_unknown_reason_ends_the_stream_and_tells_no_secrets(world):
    world.leases.refusal = FakeOutage("password=1234")
    with pytest.raises(Unavailable, match="no engine could be reached; try again"):
        await asyncio.wait_for(world.tokens(request((1,), 5)), 5)
    await world.check_nothing_is_held()


async def test_a_service_that_closes_ends_what_runs(world):
    stream = asyncio.ensure_future(world.tokens(request((1,), 1000)))
    await settle()
    await world.service.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await stream
    await world.check_nothing_is_held()


@pytest.mark.parametrize("slower", ["target", "draft"])
async def test_a_service_that_closes_waits_until_both_engines_have_freed_what_was_held(world, slower):
    stream = asyncio.ensure_future(world.tokens(request((1,), 1000)))
    await settle()
    freed = []
    for name in ("target", "draft"):
        port = getattr(world.leases, name)
        assert port.engine.logs, "held"
        port.release = partial(free_slowly, freed, port.release, 3 if name == slower else 1)
    await world.service.close()
    assert len(freed) == 2
    await asyncio.gather(stream, return_exceptions=True)


async def free_slowly(freed, release, times, sessions):
    for _ in range(times):
        await settle()
    await release(sessions)
    freed += sessions
