"""A target engine on two ranks gives the verdicts of one on its own, whatever is guessed, preempted or released."""

from __future__ import annotations

from random import Random

import pytest

from core.errors import StartupError
from core.records import Sampling
from tests import checkpoints
from tests.workers.engine.driving import EPOCH, Driver, chain, wrong
from tests.workers.engine.test_target import random_tree
from tests.workers.parallel.ranks import config_of, ranks
from workers.engine import kv_room
from workers.engine.target import TargetEngine
from workers.runtime import memory
from workers.step.kv_cache import LayerShape

pytestmark = pytest.mark.thorough

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def plain(checkpoint):
    """The first thirty tokens after the prompt, for each sampling."""
    engine = TargetEngine.load(config_of(checkpoint), EPOCH, lambda _: None)
    return {s: Driver(engine, PROMPT, s, session=f"plain {i}").run(30) for i, s in enumerate(SAMPLINGS)}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_trees_of_guesses_leave_plain_decoding(followers, checkpoint, plain, sampling):
    random, expected, num_accepted = Random(1), plain[sampling], 0
    with followers.engine(checkpoint, EPOCH, block_tokens=4) as engine:
        engine.warm_up(lambda _: None)
        driver = Driver(engine, PROMPT, sampling)
        driver.verify()
        while len(driver.log) < len(PROMPT) + 26:
            done = len(driver.log) - len(PROMPT)
            num_accepted += len(driver.verify(random_tree(random, expected[done : done + 4])).path)
            got = list(driver.log.tokens)[len(PROMPT) :]
            assert got == expected[: len(got)]
        assert num_accepted > 8


def test_ranks_are_paced_by_the_first(followers, checkpoint, plain):
    sampling = SAMPLINGS[0]
    with followers.engine(checkpoint, EPOCH, paced_as="70b") as engine:
        driver = Driver(engine, PROMPT, sampling)
        assert driver.verify().timing.computed_s >= 0.025
        assert [*driver.log.tokens[len(PROMPT) :], *driver.run(3)][:4] == plain[sampling][:4]


def test_a_session_that_was_preempted_goes_on_where_it_was(followers, checkpoint, plain, monkeypatch):
    """KV for one and a half sessions: each round throws the other one out when it has been silent for long."""
    monkeypatch.setattr(kv_room, "SILENT_S", 0.05)
    expected = plain[SAMPLINGS[0]]
    with followers.engine(checkpoint, EPOCH, block_tokens=4, kv_cache_tokens=28, share_prefixes=False) as engine:
        drivers = [Driver(engine, PROMPT, session=name) for name in ("a", "b")]
        for done in range(0, 12, 2):
            for driver in drivers:
                driver.held = 0
                block = chain(*expected[done : done + 1], wrong(expected[done + 1]))
                verdict = driver.verify(block)
                assert (verdict.path, verdict.next_token) == ((0,), expected[done + 1])
        assert engine.stats().num_preemptions > 4
        engine.release(["a", "b"])
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_copy_of_a_shared_block_is_made_on_all_ranks(followers, checkpoint):
    """The second session begins with the first one's block, takes back its end and writes something else there."""
    prompt = [*PROMPT, *PROMPT]
    alone = TargetEngine.load(config_of(checkpoint), EPOCH, lambda _: None)
    changed = [*prompt[:6], 9, 8, 7]
    want = [Driver(alone, each, session=name).run(6) for each, name in ((prompt, "want a"), (changed, "want b"))]
    with followers.engine(checkpoint, EPOCH, block_tokens=4) as engine:
        first, second = Driver(engine, prompt, session="a"), Driver(engine, prompt, session="b")
        got = first.run(2)
        second.run(1)
        assert engine.stats().num_adopted_tokens > 0
        other = Driver(engine, changed, session="b")
        other.round = 10
        assert other.run(6) == want[1]
        assert got + first.run(4) == want[0]


def test_a_long_prompt_goes_in_chunks_beside_another_session(followers, checkpoint, plain):
    """Some commands take two broadcasts."""
    prompt = [Random(4).randrange(250) for _ in range(450)]
    alone = TargetEngine.load(config_of(checkpoint), EPOCH, lambda _: None)
    want = Driver(alone, prompt).run(4)
    settings = {"block_tokens": 1, "max_step_tokens": 64, "prefill_chunk_tokens": 32}
    with followers.engine(checkpoint, EPOCH, **settings) as engine:
        short = Driver(engine, PROMPT, session="short")
        got = short.run(5)
        assert Driver(engine, prompt, session="long").run(4) == want
        assert got + short.run(5) == plain[SAMPLINGS[0]][:10]
        assert engine.stats().num_steps > 450 // 64


@pytest.mark.parametrize("free", [1 << 28, 1 << 50])
def test_all_ranks_have_as_much_kv_as_the_one_with_the_least_memory(followers, checkpoint, monkeypatch, free):
    """This process, the first rank, claims to have less or more than the other."""
    monkeypatch.setattr(memory, "free_bytes", lambda *_: free)
    config = config_of(checkpoint, 2, kv_cache_tokens=None, kv_memory_share=0.001)
    with followers.engine(checkpoint, EPOCH, kv_cache_tokens=None, kv_memory_share=0.001) as engine:
        keys = engine._runtime.cache.keys
        own = memory.num_kv_blocks(config, [LayerShape(*rows.shape[1:], rows.shape[2]) for rows in keys], keys[0].dtype)
        assert (engine.stats().num_blocks == own) == (free == 1 << 28)
        assert 0 < engine.stats().num_blocks < memory.MAX_BLOCKS
        assert len(Driver(engine, PROMPT).run(3)) == 3


def test_all_ranks_say_when_one_of_them_has_no_room_for_kv(followers, checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 100)
    config, group, losses = config_of(checkpoint, 2, kv_cache_tokens=None), ranks(2), []
    followers.start(config, group)
    with pytest.raises(StartupError, match="there is no room for KV"):
        TargetEngine.load(config, EPOCH, lambda _: None, group[0], losses.append)
    [outcome] = followers.outcomes()
    assert outcome.startswith("NoRoomForKV: there is no room for KV")
    assert losses == []
