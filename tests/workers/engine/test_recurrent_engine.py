"""Engines of a model with recurrent layers: what is sent again, cut short or preempted gives the plain output."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from core.config import EngineConfig
from core.records import DraftUpdate, Missing, Refused, Sampling
from core.speculation import TreeSpec
from tests.checkpoints import write
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, chain, run, wrong
from tests.workers.engine.growths import fresh_reply, wide
from tests.workers.engine.test_target import random_tree
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

pytestmark = pytest.mark.thorough

PROMPT = [Random(1).randrange(250) for _ in range(50)]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = str(write("qwen3_5_text", tmp_path_factory.mktemp("recurrent")))
    return lambda **settings: EngineConfig(path, **{"kv_cache_tokens": 2048} | settings)


@pytest.fixture
def load(config):
    return lambda **settings: TargetEngine.load(config(**settings), EPOCH, lambda _: None)


@pytest.fixture(scope="module")
def plain(config):
    """Plain decoding of the prompt on an engine of its own."""

    @cache
    def plain(num_tokens=20, sampling=SAMPLINGS[0]):
        engine = TargetEngine.load(config(), EPOCH, lambda _: None)
        return Driver(engine, PROMPT, sampling).run(num_tokens)

    return plain


def limit_states(engine, num_states):
    states = engine._runtime.cache.states
    del states._free[:-num_states]
    states.num_states = num_states


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_any_tree_of_guesses_leaves_plain_decoding(load, plain, sampling):
    rng, want = Random(7), plain(20, sampling)
    driver = Driver(load(prefill_chunk_tokens=16, max_step_tokens=16), PROMPT, sampling)
    got, num_accepted = [], 0
    while len(got) < 20:
        rest = want[len(got) :]
        verdict = driver.verify(random_tree(rng, rest[: rng.randint(0, len(rest))]) if rng.random() < 0.8 else chain())
        num_accepted += len(verdict.path)
        got = driver.log.tokens[len(PROMPT) :]
    assert got[:20] == want
    assert num_accepted > 4


def test_a_text_that_is_sent_again_is_computed_from_the_last_state(load, plain):
    """The state before its last token is kept; without one, the text is computed from its beginning."""
    engine, want = load(), plain()
    driver = Driver(engine, PROMPT)
    assert driver.run(5) == want[:5]
    before = engine.stats().num_rows
    assert answer(engine, driver.verify_request()).next_token == want[5]
    assert answer(engine, driver.verify_request()).next_token == want[5]
    assert engine.stats().num_rows - before == 2
    engine._store.truncate(held := engine._store.find("s"), len(PROMPT) + 2)
    assert engine._store.rewind(held) == [*PROMPT, *want[:2]]
    driver.held = 0
    assert answer(engine, driver.verify_request()).next_token == want[5]
    engine.check_integrity()


def test_sessions_without_states_wait_or_come_back_and_say_the_same(load, plain):
    """States for few sessions: others wait, are preempted, and say what they would say alone."""
    engine, want = load(), plain()
    limit_states(engine, 12)
    drivers = [Driver(engine, PROMPT, session=f"{n}") for n in range(5)]
    asked = {}
    while waiting := [driver for driver in drivers if len(driver.log) < len(PROMPT) + 8]:
        for driver in waiting:
            if driver.session not in asked:
                asked[driver.session] = chain(*want[len(driver.log) - len(PROMPT) :][:3])
                engine.add(driver.verify_request(asked[driver.session]))
        for session, reply in run(engine).items():
            driver, block = drivers[int(session)], asked.pop(session)
            driver.held = reply.held
            if not isinstance(reply, Missing):
                driver.log.extend([*(block.tokens[node] for node in reply.path), reply.next_token])
            if len(driver.log) >= len(PROMPT) + 8:
                engine.release([session])
    for driver in drivers:
        assert driver.log.tokens[len(PROMPT) :][:8] == want[:8]
    assert engine.stats().num_free_states == 12


def test_more_guesses_than_states_are_refused(load):
    engine = load()
    engine._runtime.cache.states.num_states = 10
    reply = answer(engine, Driver(engine, PROMPT).verify_request(chain(*range(9))))
    assert isinstance(reply, Refused)
    assert "9 guesses exceed the recurrent states" in reply.reason


def test_a_draft_reroots_its_tree_with_its_states(config):
    """After each verdict the tree is what an engine grows that begins with this text."""
    engine = DraftEngine.load(config(deterministic=True), EPOCH, 0, lambda _: None)
    driver = Driver(engine, PROMPT)
    for is_right in (True, True, False, True, False, False, True):
        tree = driver.draft(wide(4, 3))
        first = tree.tokens[0]
        driver.log.extend([first, 7] if is_right else [wrong(first)])
        engine.check_integrity()
    got = driver.draft(wide(4, 3))
    fresh = fresh_reply(engine, driver.spec, driver.log.tokens, wide(4, 3))
    assert list(got.tokens) == fresh.new_nodes.tokens.tolist()
    assert list(got.parents) == fresh.new_nodes.parents.tolist()


@pytest.mark.parametrize("spec", [TreeSpec(64, 9), TreeSpec(64, 9, num_passes=9)])
@pytest.mark.parametrize("num_states", [24, 60])
def test_each_session_has_guesses_accepted_however_few_states_there_are(config, load, spec, num_states):
    """Six at once, round after round, of a draft that is the target: a share for each, and nobody is preempted."""
    draft, target = DraftEngine.load(config(), EPOCH, 0, lambda _: None), load()
    for engine in (draft, target):
        limit_states(engine, num_states)
    share = num_states // 6 - 3
    of_draft, of_target = (
        {f"{n}": Driver(engine, [*PROMPT, n], session=f"{n}") for n in range(6)} for engine in (draft, target)
    )
    for _ in range(5):
        grow_all(draft, of_draft.values(), spec)
        blocks = {name: chain(*first_chain(draft._store.find(name).builder)[:share]) for name in of_draft}
        for name, driver in of_target.items():
            assert 0 < len(draft._store.find(name).tree) <= share
            target.add(driver.verify_request(blocks[name]))
        for name, verdict in run(target).items():
            assert len(verdict.path) == len(blocks[name]) > 0
            for driver in (of_draft[name], of_target[name]):
                driver.held = len(driver.log)
                driver.log.extend([*blocks[name].tokens, verdict.next_token])
        target.check_integrity()
    assert draft.stats().num_preemptions == target.stats().num_preemptions == 0


def grow_all(draft, drivers, spec):
    """Growth of all sessions together, until each has said that there will be no more, as nobody could wait for it."""
    for driver in drivers:
        draft.add(driver.draft_request(spec))
    last = {}
    while draft.has_work:
        for reply in draft.step():
            assert isinstance(reply, DraftUpdate), reply
            last[reply.stamp.lease] = reply
        draft.check_integrity()
    assert len(last) == len(drivers)
    assert all(update.is_over for update in last.values())


def first_chain(builder):
    tokens, node = [], 0
    while children := builder.children(node):
        node = children[0]
        tokens.append(builder.tokens[node])
    return tokens


def test_guesses_dropped_for_memory_grow_again(config):
    engine = DraftEngine.load(config(deterministic=True), EPOCH, 0, lambda _: None)
    driver = Driver(engine, PROMPT)
    first = driver.draft(3)
    engine._store.forget_guesses(engine._store.find("s"))
    assert driver.draft(3) == first
    engine.check_integrity()


def test_sessions_together_say_what_each_says_alone(load, plain):
    engine = load()
    prompts = [PROMPT[:n] for n in (1, 2, 33, 50)]
    alone = [Driver(load(), prompt).run(1) for prompt in prompts]
    drivers = [Driver(engine, prompt, session=f"{n}") for n, prompt in enumerate(prompts)]
    together = answer_all(engine, [driver.verify_request() for driver in drivers])
    assert [[reply.next_token] for reply in together] == alone


def test_a_prompt_that_was_computed_before_goes_on_from_its_last_whole_block(load, plain):
    engine = load(block_tokens=4)
    assert Driver(engine, PROMPT, session="first").run(1) == plain()[:1]
    again = Driver(engine, PROMPT)
    verdict = again.verify()
    assert verdict.num_cached == 48
    assert [verdict.next_token, *again.run(9)] == plain()[:10]
    beside = Driver(engine, [*PROMPT[:30], 7, 8, 9], session="beside")
    verdict = beside.verify()
    assert verdict.num_cached == 0, "no state was kept there"
    assert [verdict.next_token] == Driver(load(), [*PROMPT[:30], 7, 8, 9]).run(1)


def test_a_conversation_goes_on_from_what_was_generated(load, plain):
    engine, want = load(block_tokens=4), plain()
    first = Driver(engine, PROMPT, session="first")
    while len(first.log) < len(PROMPT) + 15:
        first.verify(chain(*want[len(first.log) - len(PROMPT) :][:3]))
    text = [*first.log.tokens[: len(PROMPT) + 15], 3, 4]
    engine.release(["first"])
    second = Driver(engine, text, session="second")
    verdict = second.verify()
    assert verdict.num_cached == 64
    assert [verdict.next_token, *second.run(4)] == Driver(load(share_prefixes=False), text).run(5)


@pytest.mark.parametrize("seed", range(2))
def test_sessions_that_share_go_back_and_are_thrown_out_say_what_they_would_say_alone(load, plain, seed):
    """Few states, prompts with common beginnings, deterministic: any stale state would show."""
    rng, engine = Random(seed), load(block_tokens=4, deterministic=True, kv_cache_tokens=512)
    limit_states(engine, 24)
    alone = load(share_prefixes=False, deterministic=True)
    prompts = [[*PROMPT[: rng.choice([24, 40])], *rng.choices(range(250), k=rng.randint(1, 9))] for _ in range(8)]
    want = [Driver(alone, prompt, session=f"{n}").run(6) for n, prompt in enumerate(prompts)]
    for n, prompt in enumerate(prompts * 2):
        driver = Driver(engine, prompt, session=f"{n}")
        got = []
        while len(got) < 6:
            engine.add(driver.verify_request(chain(*want[n % 8][len(got) :][: rng.randint(0, 3)])))
            block = engine._jobs[-1].block
            (reply,) = run(engine).values()
            driver.held = reply.held
            if isinstance(reply, Missing):
                continue
            driver.log.extend([*(block.tokens[node] for node in reply.path), reply.next_token])
            got = driver.log.tokens[len(prompt) :]
        assert got[:6] == want[n % 8]
        engine.release([f"{n - 2}"])
    assert engine.stats().num_adopted_tokens > 0


def test_a_text_that_goes_back_further_than_the_states_is_computed_again(load, plain):
    """A request does so on a target, whatever the engine held of the longer text."""
    engine, want = load(share_prefixes=False), plain()
    driver = Driver(engine, PROMPT)
    driver.run(6)
    driver.log.truncate(len(PROMPT) + 2)
    driver.held = len(driver.log)
    assert driver.run(3) == want[2:5]
    driver.log.truncate(len(PROMPT) + 1)
    driver.held = len(driver.log)
    driver.log.extend([wrong(want[1])])
    assert driver.run(2) == Driver(load(), [*PROMPT, want[0], wrong(want[1])]).run(2)


def test_a_draft_goes_back_further_than_its_states(config):
    engine = DraftEngine.load(config(share_prefixes=False, deterministic=True), EPOCH, 0, lambda _: None)
    driver = Driver(engine, PROMPT)
    first = driver.draft(3)
    driver.log.extend(first.tokens)
    driver.draft(3)
    driver.log.truncate(len(PROMPT))
    driver.held = len(driver.log)
    assert driver.draft(3) == first
