"""Common prefixes of prompts are computed once, and nobody can tell from the output."""

from __future__ import annotations

from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.records import Missing, Refused, Sampling, Verdict
from tests.checkpoints import write
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, chain, step, wrong
from tests.workers.engine.growths import wide
from tests.workers.engine.test_target import random_tree
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

pytestmark = pytest.mark.thorough

BLOCK = 4
PROMPT = [Random(1).randrange(250) for _ in range(30)]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)]


@pytest.fixture
def load(checkpoint):
    def load(**settings):
        settings = {"deterministic": True, "kv_cache_tokens": 2048} | settings
        return TargetEngine.load(EngineConfig(checkpoint, block_tokens=BLOCK, **settings), EPOCH, lambda _: None)

    return load


@pytest.fixture
def alone(load):
    """Plain decoding of one prompt on an engine of its own."""

    def alone(prompt, num_tokens, sampling=SAMPLINGS[0]):
        return Driver(load(share_prefixes=False), prompt, sampling).run(num_tokens)

    return alone


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_prompt_that_begins_like_another_computes_only_the_rest(load, alone, sampling):
    engine = load()
    Driver(engine, PROMPT, session="first").verify()
    before = engine.stats().num_rows
    prompt = [*PROMPT[:21], 7, 8, 9]
    second = Driver(engine, prompt, sampling)
    verdict = second.verify()
    assert verdict.num_cached == 20
    got = [verdict.next_token]
    assert engine.stats().num_rows - before == len(prompt) - 20
    assert engine.stats().num_adopted_tokens == 20
    assert got + second.run(11) == alone(prompt, 12, sampling)


def test_the_same_prompt_computes_what_follows_its_last_whole_block(load, alone):
    engine = load()
    for length, num_computed in [(28, 28), (28, 4), (29, 1), (30, 2)]:
        before = engine.stats().num_rows
        token = Driver(engine, PROMPT[:length], session=f"{before}").verify().next_token
        assert engine.stats().num_rows - before == num_computed, f"{length} tokens"
        assert [token] == alone(PROMPT[:length], 1)


def test_only_the_verdict_that_the_cache_was_used_for_says_so(load):
    engine = load()
    assert Driver(engine, PROMPT, session="first").verify().num_cached == 0
    second = Driver(engine, PROMPT, session="second")
    assert [second.verify().num_cached for _ in range(3)] == [28, 0, 0]
    assert Driver(load(share_prefixes=False), PROMPT).verify().num_cached == 0


def test_a_conversation_goes_on_from_what_was_generated(load, alone):
    """The first session ends; its prompt, its output and a new question are the prompt of the next one."""
    engine = load()
    first = Driver(engine, PROMPT, session="first")
    expected = alone(PROMPT, 20)
    first.verify()
    while len(first.log) < len(PROMPT) + 16:
        done = len(first.log) - len(PROMPT)
        first.verify(random_tree(Random(done), expected[done : done + 4]))
    engine.release(["first"])
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    prompt = [*first.log.tokens[:-1], 5, 6]
    second = Driver(engine, prompt, session="second")
    assert second.run(8) == alone(prompt, 8)
    assert engine.stats().num_adopted_tokens == (len(first.log) - 1) // BLOCK * BLOCK


def test_what_was_rejected_is_adopted_by_nobody(load, alone):
    """Whole blocks of wrong guesses: a prompt that consists of them has to be computed."""
    engine = load()
    first = Driver(engine, PROMPT, session="first")
    token = first.verify().next_token
    guesses = [wrong(token + n) for n in range(12)]
    assert first.verify(chain(*guesses)).path == ()
    prompt = [*PROMPT, token, *guesses, 3]
    assert Driver(engine, prompt, session="second").run(6) == alone(prompt, 6)
    assert engine.stats().num_adopted_tokens == 28


def test_a_session_that_goes_back_into_what_it_shares_spoils_nobody(load, alone):
    """One of two sessions takes back the end of their common prompt and puts something else there."""
    engine = load()
    first = Driver(engine, PROMPT, session="first")
    first.verify()
    second = Driver(engine, PROMPT, session="second")
    second.verify()
    changed = Driver(engine, [*PROMPT[:18], 1, 2, 3], session="second")
    changed.round = 10
    assert changed.run(9) == alone(changed.log.tokens[:21], 9)
    assert first.run(9) == alone(PROMPT, 10)[1:]
    third = Driver(engine, PROMPT, session="third")
    assert third.run(5) == alone(PROMPT, 5), "what others adopt is what was there before"


def long_prompts(num_common, num_prompts):
    random = Random(2)
    common = [random.randrange(250) for _ in range(num_common)]
    return [[*common, n, n + 1, n + 2] for n in range(num_prompts)]


def test_of_many_that_arrive_together_one_computes_what_they_share(load, alone):
    engine = load(max_step_tokens=64)
    prompts = long_prompts(100, 6)
    drivers = [Driver(engine, prompt, session=f"{n}") for n, prompt in enumerate(prompts)]
    replies = answer_all(engine, [driver.verify_request() for driver in drivers])
    assert engine.stats().num_rows == 103 + 5 * 3
    assert [replies[n].next_token for n in range(6)] == [alone(prompt, 1)[0] for prompt in prompts]
    assert [replies[n].num_cached for n in range(6)] == [0, *[100] * 5]


def test_nobody_waits_for_what_is_little_of_what_it_lacks(load):
    engine = load(max_step_tokens=512)
    prompts = [long_prompts(64, 1)[0], [*long_prompts(64, 1)[0][:64], *PROMPT, *PROMPT, *PROMPT]]
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add(Driver(engine, prompt, session=name).verify_request())
    assert step(engine).keys() == {*"ab"}


@pytest.mark.parametrize("end", ["released", "overtaken", "preempted"])
def test_who_waited_for_one_that_ends_early_goes_on_alone(load, alone, end):
    settings = {"kv_cache_tokens": 128, "max_step_tokens": 40} if end == "preempted" else {"max_step_tokens": 40}
    engine = load(**settings)
    prompts = long_prompts(100, 2)
    if end == "preempted":
        older = Driver(engine, [9, 9, 9, 9, 9], session="older")
        older.run(2)
    leader, follower = (Driver(engine, prompt, session=f"{n}") for n, prompt in enumerate(prompts))
    engine.add(leader.verify_request())
    engine.add(follower.verify_request())
    replies = step(engine)
    if end == "released":
        engine.release(["0"])
    elif end == "overtaken":
        engine.add(leader.verify_request())
    else:
        assert older.verify(chain(*[1] * 30)).path == (), "it needs what the leader has computed"
        engine.release(["older"])  # else the follower waits for its room
    for _ in range(40):
        replies.update(step(engine))
        engine.check_integrity()
    assert replies["1"].next_token == alone(prompts[1], 1)[0]


def test_sharing_leaves_room_for_more(load, alone):
    """KV for two of these prompts holds eight of them, whose beginnings are one."""
    engine = load(kv_cache_tokens=208)
    drivers = [Driver(engine, prompt, session=f"{n}") for n, prompt in enumerate(long_prompts(88, 8))]
    for _ in range(4):
        for driver in drivers:
            driver.verify()
    assert engine.stats().num_preemptions == 0
    assert [list(driver.log.tokens[91:]) for driver in drivers] == [alone(d.log.tokens[:91], 4) for d in drivers]


def test_what_is_kept_makes_room_for_what_is_asked(load, alone):
    engine = load(kv_cache_tokens=128)
    for n in range(6):
        prompt = [n, *PROMPT, *PROMPT, *PROMPT]
        assert Driver(engine, prompt, session=f"{n}").run(3) == alone(prompt, 3)
        engine.release([f"{n}"])
    assert engine.stats().num_preemptions == 0
    assert engine.stats().num_adopted_tokens == 0


def test_a_sequence_that_is_nan_is_adopted_by_nobody(tmp_path, alone):
    """It would not even harm: the same tokens are NaN for all. But a fault of the device is not in the tokens."""
    poison = 250
    path = write("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = TargetEngine.load(EngineConfig(str(path), block_tokens=BLOCK), EPOCH, lambda _: None)
    for session in ("a", "b"):
        bad = Driver(engine, [poison, *PROMPT], session=session)
        assert isinstance(answer(engine, bad.verify_request()), Refused)
        engine.check_integrity()
    assert engine.stats().num_adopted_tokens == 0
    assert Driver(engine, PROMPT).run(4) == alone(PROMPT, 4)


def test_nothing_is_shared_where_nobody_wants_it(load):
    engine = load(share_prefixes=False)
    for n in range(2):
        Driver(engine, PROMPT, session=f"{n}").verify()
    engine.release(["0", "1"])
    assert engine.stats().num_adopted_tokens == 0
    assert engine.stats().num_rows == 2 * len(PROMPT)


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_come_share_go_back_and_are_thrown_out_say_what_they_would_say_alone(load, alone, seed):
    """Prompts of a family tree, random trees of guesses, KV for a few of them."""
    random = Random(seed)
    engine = load(kv_cache_tokens=160, max_step_tokens=48)
    prompts = [
        [*PROMPT[: random.randrange(2, 30)], *(random.randrange(3) for _ in range(random.randrange(1, 9)))]
        for _ in range(6)
    ]
    expected = {tuple(prompt): alone(prompt, 20) for prompt in prompts}
    live = {}
    for n in range(60):
        if len(live) < 4:
            prompt = random.choice(prompts)
            live[f"{n}"] = Driver(engine, prompt, session=f"{n}"), len(prompt)
        together = random.sample(sorted(live), random.randint(1, len(live)))
        requests = []
        for name in together:
            driver, num_prompt = live[name]
            done = len(driver.log) - num_prompt
            right = expected[tuple(driver.log.tokens[:num_prompt])][done : done + 4]
            block = random_tree(random, right) if done else chain()
            requests.append((driver, block, driver.verify_request(block)))
        replies = answer_all(engine, [request for _, _, request in requests])
        for (driver, block, _), reply in zip(requests, replies, strict=True):
            if isinstance(reply, Verdict):
                driver.log.extend([*(block.tokens[node] for node in reply.path), reply.next_token])
            assert isinstance(reply, Verdict | Missing), reply
            driver.held = reply.held
        for name in together:
            driver, num_prompt = live[name]
            got = list(driver.log.tokens[num_prompt:])
            assert got[:20] == expected[tuple(driver.log.tokens[:num_prompt])][: len(got)]
            if len(got) > 12 or random.random() < 0.1:
                engine.release([name])
                del live[name]
    assert engine.stats().num_adopted_tokens > 100
    engine.release(sorted(live))
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_draft_begins_with_what_others_left_and_guesses_the_same(checkpoint):
    def load(**settings):
        config = EngineConfig(checkpoint, block_tokens=BLOCK, deterministic=True, kv_cache_tokens=2048, **settings)
        return DraftEngine.load(config, EPOCH, 8, lambda _: None)

    engine, growth = load(), wide()
    Driver(engine, PROMPT, session="first").draft(growth)
    before = engine.stats().num_rows
    got = Driver(engine, PROMPT, session="second").draft(growth)
    assert got == Driver(load(share_prefixes=False), PROMPT).draft(growth)
    assert engine.stats().num_adopted_tokens == 28
    assert engine.stats().num_rows - before < len(PROMPT)
