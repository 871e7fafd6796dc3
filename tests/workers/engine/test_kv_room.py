"""Sessions make room in a certain order when a draft's KV is full, at a certain cost, and silent ones expire."""

from __future__ import annotations

import pytest

from core.config import EngineConfig
from core.records import Missing, Refused, Sampling, Verdict
from tests.workers.engine.driving import EPOCH, Driver, answer, chain, has_grown, run, step
from tests.workers.engine.growths import wide
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
TREE = wide(num_rows=4, num_passes=5)


@pytest.fixture
def target(checkpoint):
    """Loads a target with so much room."""
    return lambda kv_cache_tokens, **settings: TargetEngine.load(
        config(checkpoint, kv_cache_tokens, **settings), EPOCH, lambda _: None
    )


@pytest.fixture
def draft(checkpoint):
    return lambda kv_cache_tokens: DraftEngine.load(config(checkpoint, kv_cache_tokens), EPOCH, 16, lambda _: None)


def config(checkpoint, kv_cache_tokens, **settings):
    settings = {"block_tokens": 4, "share_prefixes": False, "deterministic": True, **settings}
    return EngineConfig(checkpoint, kv_cache_tokens=kv_cache_tokens, **settings)


def idle_sessions(engine, names):
    """Sessions whose prompts have been computed, two blocks each; the last one is the newest."""
    drivers = [Driver(engine, PROMPT, session=name) for name in names]
    for driver in drivers:
        driver.verify()
    return drivers


def drafted_sessions(engine, names):
    """The same of a draft, each with one guess that it has told of and not fed."""
    drivers = [Driver(engine, PROMPT, session=name) for name in names]
    for driver in drivers:
        driver.ask(1)
    return drivers


def held(engine):
    return [sequence.session for sequence in engine._store if sequence.kv.num_tokens]


def test_the_newest_idle_session_makes_room_and_no_other(draft):
    engine = draft(28)
    *older, newest = drafted_sessions(engine, "abc")
    assert has_grown(answer(engine, Driver(engine, PROMPT, session="d").draft_request(1)))
    assert held(engine) == ["a", "b", "d"]
    assert engine.stats().num_preemptions == 1
    engine.release("d")
    assert [answer(engine, driver.draft_request(1)).held for driver in older] == [6, 6], "they go on where they were"
    assert isinstance(answer(engine, newest.draft_request(1)), Missing)


def test_an_idle_session_makes_room_before_a_newer_one_that_is_in_progress(draft):
    engine = draft(28)
    first, _, last = drafted_sessions(engine, "abc")
    first.log.extend([7] * 7)
    last.log.extend([7])
    rows_before = engine.stats().num_rows
    engine.add(first.draft_request(1))
    engine.add(last.draft_request(1))
    replies = step(engine)
    assert has_grown(replies["a"])
    assert has_grown(replies["c"])
    assert held(engine) == ["a", "c"]
    assert engine.stats().num_rows - rows_before == 7 + 1, "nobody began again"


def test_of_those_in_progress_the_newest_begins_again(draft):
    engine = draft(24)
    drivers = drafted_sessions(engine, "abc")
    for driver, num_tokens in zip(drivers, (7, 1, 1), strict=True):
        driver.log.extend([7] * num_tokens)
        engine.add(driver.draft_request(1))
    assert sorted(step(engine)) == ["a", "b"]
    assert has_grown(run(engine)["c"])


def test_the_newest_idle_session_gives_up_its_guesses_first(draft):
    engine = draft(40)
    for name in "ab":
        Driver(engine, PROMPT, session=name).ask(wide(num_passes=2))
    assert [len(engine._store.find(name).tree) for name in "ab"] == [8, 8]
    assert has_grown(Driver(engine, [7] * 12, session="c").ask(1))
    assert [len(engine._store.find(name).tree) for name in "ab"] == [8, 0]
    assert engine.stats().num_preemptions == 0


def begun_tree(engine):
    """A session in the middle of a tree, below guesses that it holds from the block before."""
    driver = Driver(engine, PROMPT, Sampling(temperature=0.9, seed=3), session="tree")
    driver.draft(3)
    engine.add(driver.draft_request(TREE))
    assert not engine.step(), "it takes several passes"


def right_tree(draft, *, has_begun):
    """The same where there is room, with or without the guesses that it holds."""
    driver = Driver(draft(512), PROMPT, Sampling(temperature=0.9, seed=3))
    if has_begun:
        driver.draft(3)
    return driver.ask(TREE).new_nodes


def test_a_tree_below_guesses_that_are_held_begins_again_when_it_loses_its_room(draft):
    """The guesses that it stands on go with the rest, and are computed once more. Who came first keeps its room."""
    engine = draft(40)
    engine.add(Driver(engine, PROMPT, session="first").draft_request(25))
    begun_tree(engine)
    replies = run(engine)
    assert has_grown(replies["first"])
    got, want = replies["tree"].new_nodes, right_tree(draft, has_begun=False)
    assert (got.tokens.tolist(), got.ranks.tolist()) == (want.tokens.tolist(), want.ranks.tolist())
    assert engine.stats().num_preemptions > 0


def test_a_tree_in_progress_keeps_its_guesses_while_somebody_rests(draft):
    engine = draft(40)
    urgent, idle = (Driver(engine, PROMPT, session=name) for name in ("urgent", "idle"))
    for driver in (urgent, idle):
        driver.ask(1)
    begun_tree(engine)
    urgent.log.extend([7] * 5)
    engine.add(urgent.draft_request(1))
    replies = run(engine)
    assert has_grown(replies["urgent"])
    assert held(engine) == ["urgent", "tree"]
    assert replies["tree"].new_nodes == right_tree(draft, has_begun=True)
    assert replies["tree"].timing.num_passes == 5, "it did not begin again"


def test_a_message_that_comes_twice_is_answered_once_and_computed_once(target):
    engine = target(64)
    driver = Driver(engine, PROMPT)
    driver.verify()
    request = driver.verify_request()
    for _ in range(2):
        engine.add(request)
    refused, verdict = engine.step()
    assert isinstance(verdict, Verdict)
    assert isinstance(refused, Refused)
    num_rows = engine.stats().num_rows
    assert isinstance(answer(engine, request), Refused), "nor after it has been answered"
    assert engine.stats().num_rows == num_rows


def test_who_has_been_silent_for_too_long_expires_unless_it_is_being_served(target, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr("workers.engine.base.monotonic", lambda: now_s[0])
    engine = target(64, session_timeout_s=100.0)
    silent, busy = idle_sessions(engine, ("silent", "busy"))
    engine.add(busy.verify_request())
    now_s[0] += 60.0
    talking = Driver(engine, PROMPT, session="talking")
    engine.add(talking.verify_request())
    assert engine.expire() == []
    now_s[0] += 60.0
    assert engine.expire() == ["silent"]
    assert held(engine) == ["busy"], "the last one has computed nothing yet"
    assert all(isinstance(reply, Verdict) for reply in run(engine).values())
    now_s[0] += 90.0
    assert engine.expire() == [], "the time counts from the reply to the last message"
    now_s[0] += 20.0
    assert engine.expire() == ["busy", "talking"]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert isinstance(answer(engine, silent.verify_request()), Missing)


def test_room_for_all_sessions_of_a_step_is_made_at_once(target, monkeypatch):
    """Erasing touches each layer, however few blocks there are."""
    engine = target(200)
    erased = []
    erase = engine._runtime.cache.erase
    monkeypatch.setattr(engine._runtime.cache, "erase", lambda blocks: (erased.append(len(blocks)), erase(blocks)))
    for driver in idle_sessions(engine, "abc"):
        engine.add(driver.verify_request(chain(*[7] * 9)))
    assert erased == [2, 2, 2]
    assert len(run(engine)) == 3
    assert erased[3:] == [6]
