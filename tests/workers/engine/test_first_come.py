"""Sessions get room for their KV in the order in which they came: who waits, who is preempted, and for how long."""

from __future__ import annotations

import pytest

from core.config import EngineConfig
from core.protocol import OVERTAKEN
from core.records import Missing, Refused, Sampling, Stamp, Verdict
from tests.workers.engine.driving import EPOCH, Driver, answer, chain, run, step, wrong
from tests.workers.engine.test_continuing import Offering, steps
from workers.engine.kv_room import SILENT_S
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
"""Two blocks, which have room for two tokens more."""
SAMPLED = Sampling(temperature=0.9, seed=3)


@pytest.fixture
def load(checkpoint):
    """Loads a target with room for so many tokens, in blocks of four."""

    def load(kv_cache_tokens, **settings):
        settings = {"block_tokens": 4, "share_prefixes": False, "deterministic": True, **settings}
        config = EngineConfig(checkpoint, kv_cache_tokens=kv_cache_tokens, **settings)
        return TargetEngine.load(config, EPOCH, lambda _: None)

    return load


@pytest.fixture
def plain(load):
    """Plain decoding of a prompt on an engine of its own."""
    return lambda prompt=PROMPT, num_tokens=8: Driver(load(512), prompt, SAMPLED).run(num_tokens)


@pytest.fixture
def clock(monkeypatch):
    """The time by which sessions are silent, in a list."""
    now_s = [1000.0]
    for module in ("base", "kv_room"):
        monkeypatch.setattr(f"workers.engine.{module}.monotonic", lambda: now_s[0])
    return now_s


def driver_of(engine, name, prompt=PROMPT):
    return Driver(engine, prompt, SAMPLED, session=name)


def between_rounds(engine, names):
    """Sessions whose first token has been computed, two blocks each; the last one is the newest."""
    drivers = [driver_of(engine, name) for name in names]
    for driver in drivers:
        driver.verify()
    return drivers


def held(engine):
    return [sequence.session for sequence in engine._store if sequence.kv.num_tokens]


def long_block(driver, plain_tokens):
    """Guesses that are rejected, and need three blocks more than the text has."""
    return chain(*[wrong(plain_tokens[len(driver.log) - len(PROMPT)])] * 12)


def test_a_newcomer_waits_until_another_session_ends(load, plain):
    engine = load(28)
    older = between_rounds(engine, "abc")
    engine.add(driver_of(engine, "d").verify_request())
    assert run(engine) == {}
    assert not engine.has_work, "nothing can be computed before a message comes"
    assert engine.stats().num_waiting == 1
    assert [driver.verify().next_token for driver in older] == [plain()[1]] * 3, "sessions between rounds keep their KV"
    assert engine.stats().num_preemptions == 0
    engine.release(["b"])
    assert run(engine)["d"].next_token == plain()[0]
    assert engine.stats().num_waiting == 0


def test_nobody_begins_before_one_that_has_waited_for_longer(load):
    """Though there would be room for it: else a long prompt would wait for as long as short ones come."""
    engine = load(28)
    between_rounds(engine, "ab")
    engine.add(driver_of(engine, "long", PROMPT * 3).verify_request())
    engine.add(driver_of(engine, "short").verify_request())
    assert run(engine) == {}
    engine.release(["a"])
    assert list(run(engine)) == ["long"]


@pytest.mark.parametrize("is_idle", [True, False])
def test_where_an_older_session_grows_the_newest_is_sent_back_idle_or_not(load, plain, is_idle):
    engine = load(28)
    first, second, newest = between_rounds(engine, "abc")
    tokens = plain()
    if not is_idle:
        engine.add(newest.verify_request())
    engine.add(first.verify_request(long_block(first, tokens)))
    engine.add(second.verify_request())
    replies = run(engine)
    if is_idle:
        engine.add(newest.verify_request())
        replies |= run(engine)
    assert [replies[name].next_token for name in "ab"] == [tokens[1]] * 2
    assert replies["c"] == Missing(replies["c"].stamp, 0), "its own reply, and no verdict beside it"
    assert engine.stats().num_preemptions == 1


def test_who_was_preempted_comes_back_with_what_it_would_have_said(load, plain):
    """With its prefix in the cache and without, and after others have used its blocks."""
    for kv_cache_tokens, share_prefixes in ((24, True), (28, False)):
        engine, tokens = load(kv_cache_tokens, share_prefixes=share_prefixes), plain()
        first, second, newest = between_rounds(engine, "abc")
        newest.verify()
        first.verify(long_block(first, tokens))
        second.verify(long_block(second, tokens))
        assert isinstance(answer(engine, newest.verify_request()), Missing)
        newest.held = 0
        engine.release(["a"])
        assert newest.run(5) == tokens[2:7]
        assert second.run(3) == tokens[2:5]


def test_the_newest_gives_way_to_all_others_and_costs_none_of_them_its_kv(load, plain):
    engine = load(28)
    *_, newest = between_rounds(engine, "abc")
    assert isinstance(answer(engine, newest.verify_request(long_block(newest, plain()))), Missing)
    assert held(engine) == ["a", "b"]


def test_one_that_was_preempted_begins_before_newcomers_while_its_message_is_on_its_way(load, plain):
    engine, tokens = load(24), plain()
    first, newest = between_rounds(engine, "ab")
    engine.add(driver_of(engine, "c", PROMPT * 2).verify_request())
    engine.add(driver_of(engine, "d").verify_request())
    first.verify(long_block(first, tokens))
    first.verify()
    assert held(engine) == ["a"], "there is room, and it is not for the newcomers"
    assert isinstance(answer(engine, newest.verify_request()), Missing)
    newest.held = 0
    engine.add(newest.verify_request())
    assert list(run(engine)) == ["b"]


def test_one_that_was_preempted_and_does_not_come_back_keeps_nobody_waiting_for_long(load, plain, clock):
    engine, tokens = load(24), plain()
    first, _ = between_rounds(engine, "ab")
    first.verify(long_block(first, tokens))
    first.verify()
    engine.add(driver_of(engine, "c").verify_request())
    assert run(engine) == {}
    clock[0] += SILENT_S + 1
    engine._store.find("a").last_used_s = clock[0]
    engine.expire()
    assert list(run(engine)) == ["c"]
    assert held(engine) == ["a", "c"]


def test_a_newcomer_leaves_the_others_room_for_as_many_guesses_as_they_had_last(load, plain):
    """Or the next round would cost it the KV that it has just computed."""
    engine = load(28)
    (first,) = between_rounds(engine, "a")
    first.verify(long_block(first, plain()))
    engine.add(driver_of(engine, "b", PROMPT * 2).verify_request())
    assert run(engine) == {}
    engine.add(first.verify_request())
    assert sorted(run(engine)) == ["a", "b"], "there are no guesses any more"


def test_a_prefill_in_progress_that_gives_way_begins_again_by_itself(load, plain):
    """Its message has brought the whole text, so nothing has to be sent again."""
    engine, tokens = load(52, max_step_tokens=16), plain()
    (first,) = between_rounds(engine, "a")
    prompt = PROMPT * 7
    engine.add(driver_of(engine, "b", prompt).verify_request())
    assert not engine.step(), "it takes several steps"
    assert held(engine) == ["a", "b"]
    engine.add(first.verify_request(long_block(first, tokens)))
    assert list(step(engine)) == ["a"]
    assert held(engine) == ["a"]
    assert engine.stats().num_preemptions == 1
    engine.release(["a"])
    assert run(engine)["b"].next_token == plain(prompt, 1)[0]


def test_a_session_that_ends_while_it_waits_is_answered_and_leaves_nothing(load):
    engine = load(28)
    between_rounds(engine, "abc")
    for name in "de":
        engine.add(driver_of(engine, name).verify_request())
    assert run(engine) == {}
    engine.release(["d"])
    assert isinstance(run(engine)["d"], Refused)
    engine.release(["a"])
    assert isinstance(run(engine)["e"], Verdict)
    engine.release("bce")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_later_message_takes_the_place_of_one_that_waits(load, plain):
    engine = load(28)
    between_rounds(engine, "abc")
    waiting = driver_of(engine, "d")
    first, second = waiting.verify_request(), waiting.verify_request()
    engine.add(first)
    assert run(engine) == {}
    engine.add(second)
    assert run(engine) == {"d": Refused(first.stamp, OVERTAKEN)}
    engine.release(["c"])
    replies = run(engine)
    assert list(replies) == ["d"]
    assert (replies["d"].stamp, replies["d"].next_token) == (second.stamp, plain()[0])


def test_one_that_has_been_silent_for_long_makes_room_whenever_it_came(load, clock):
    engine = load(28)
    silent, *_ = between_rounds(engine, "abc")
    clock[0] += SILENT_S + 1
    for name in "bc":
        engine._store.find(name).last_used_s = clock[0]
    assert isinstance(answer(engine, driver_of(engine, "d").verify_request()), Verdict)
    assert held(engine) == ["b", "c", "d"]
    assert isinstance(answer(engine, silent.verify_request()), Missing)


def test_a_session_that_waits_does_not_expire(load, clock):
    engine = load(28, session_timeout_s=100.0)
    older = between_rounds(engine, "abc")
    engine.add(driver_of(engine, "d").verify_request())
    for _ in range(30):
        clock[0] += SILENT_S - 1
        for driver in older:
            driver.verify()
            driver.log.truncate(len(PROMPT))
            driver.held = 0
        assert engine.expire() == []
        assert engine.stats().num_waiting == 1
    engine.release("c")
    assert isinstance(run(engine)["d"], Verdict)
    assert engine.expire() == [], "it has been served just now"


def test_blocks_that_others_use_cost_a_newcomer_nothing(load, plain):
    """KV for one prompt and a few tokens more: a second one of the same beginning finds room, another does not."""
    engine = load(44, share_prefixes=True)
    prompt = [*range(32)]
    driver_of(engine, "a", [*prompt, 7]).verify()
    engine.add(driver_of(engine, "other", [9, *prompt]).verify_request())
    assert run(engine) == {}
    engine.release(["other"])
    run(engine)
    same = driver_of(engine, "b", [*prompt, 8])
    assert same.verify().next_token == plain([*prompt, 8], 1)[0]
    assert held(engine) == ["a", "b"]
    engine.check_integrity()


def test_what_a_session_that_waits_could_adopt_stays_free_for_others(load):
    engine = load(48, share_prefixes=True)
    prompt = [*range(32)]
    driver_of(engine, "ended", prompt).verify()
    engine.release(["ended"])
    (first,) = between_rounds(engine, "a")
    engine.add(driver_of(engine, "long", [*prompt, *range(9)]).verify_request())
    assert run(engine) == {}
    assert engine.stats().num_free_blocks == 10
    assert isinstance(answer(engine, first.verify_request(chain(*[1] * 12))), Verdict)
    assert engine.stats().num_preemptions == 0


def test_a_target_that_has_gone_on_by_itself_tells_that_the_message_it_made_has_no_room(load, plain):
    engine, tokens = load(28), plain()
    first, second = between_rounds(engine, "ab")
    newest = Offering(engine, PROMPT, SAMPLED, session="c")
    asked = newest.ask()
    offered = newest.offer(asked, chain(), is_open=True)
    verdict = steps(engine)[asked]
    assert verdict.continued == offered
    newest.commit(verdict, chain())
    engine.add(first.verify_request(long_block(first, tokens)))
    replies = run(engine)
    assert isinstance(replies["a"], Verdict)
    assert replies["c"] == Missing(Stamp("c", EPOCH, offered), 0)
    newest.held = 0
    engine.release(["b"])
    assert newest.run(3) == tokens[1:4]
    assert second.session not in held(engine)
