"""Growth that ends by itself, by a real model: one reply, after as many passes as it may take, and then rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.protocol import OVERTAKEN
from core.records import Refused, Sampling
from core.speculation.growth import Measure, TreeSpec
from core.speculation.token_tree import ROOT
from tests.workers.engine.driving import EPOCH, Driver, answer, has_grown, run, step
from workers.engine.draft import DraftEngine

PROMPT = [5, 17, 99, 4, 200, 31]
CHAIN = TreeSpec(1, 4, calibration=(3.0, 0.0), num_passes=4, fanout=1)
TREE = TreeSpec(3, 4, calibration=(0.0, 1.0), tail=(0.4, 0.2, 0.1), num_passes=4)
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)]


def load(checkpoint, kv_cache_tokens=4096):
    config = EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=kv_cache_tokens, share_prefixes=False)
    return DraftEngine.load(config, EPOCH, 16, lambda _: None)


@pytest.fixture
def engine(checkpoint):
    return load(checkpoint)


def grown(engine, driver, tree_spec):
    reply = answer(engine, driver.draft_request(tree_spec))
    assert has_grown(reply)
    assert not engine.has_work, "it rests until the next message"
    assert engine.stats().num_jobs == 0
    engine.check_integrity()
    driver.held = reply.held
    return reply


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_chain_is_told_once_and_goes_on_below_what_was_told(engine, sampling):
    driver = Driver(engine, PROMPT, sampling, session="s")
    for number in range(3):
        reply = grown(engine, driver, CHAIN)
        tokens = reply.new_nodes.tokens.tolist()
        assert tuple(tokens) == Driver(engine, driver.log.tokens, sampling, session=f"{number}").draft(4).tokens
        assert reply.new_nodes.parents[1:].tolist() == list(range(reply.new_nodes.first, reply.new_nodes.first + 3))
        assert reply.new_nodes.parents[0] == ROOT or reply.new_nodes.parents[0] == reply.new_nodes.root
        assert reply.timing.num_passes == 4
        driver.log.extend([*tokens, 7])


def test_the_reply_comes_with_the_last_pass_and_not_behind_the_next_of_others(engine):
    engine.add(Driver(engine, PROMPT, session="s").draft_request(CHAIN))
    replies = [step(engine) for _ in range(4)]
    assert replies[:3] == [{}] * 3
    assert has_grown(replies[3]["s"])


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_no_more_passes_are_made_than_it_may_take(engine, num_passes):
    driver = Driver(engine, PROMPT, session="s")
    before = engine.stats().num_steps
    reply = grown(engine, driver, replace(TREE, num_passes=num_passes))
    assert engine.stats().num_steps - before == reply.timing.num_passes == num_passes
    assert len(reply.new_nodes) > 0


def test_what_is_held_already_takes_no_pass(engine):
    driver = Driver(engine, PROMPT, session="s")
    first = grown(engine, driver, replace(TREE, max_depth=1))
    again = grown(engine, driver, replace(TREE, max_depth=1))
    assert first.timing.num_passes == 1
    assert again.timing is None
    assert (again.new_nodes.first, len(again.new_nodes)) == (len(first.new_nodes), 0), "nor is it told again"


def test_it_ends_where_the_draft_is_unsure(engine):
    driver = Driver(engine, PROMPT, session="s")
    reply = grown(engine, driver, replace(CHAIN, measure=Measure.CONFIDENCE, min_confidence=1.0))
    assert (len(reply.new_nodes), reply.timing.num_passes) == (0, 1)


def test_it_is_overtaken_by_the_next_message(engine):
    driver = Driver(engine, PROMPT, session="s")
    first = driver.draft_request(TREE)
    engine.add(first)
    engine.step()
    driver.log.extend([9])
    engine.add(driver.draft_request(TREE))
    replies = engine.step()
    assert replies[0] == Refused(first.stamp, OVERTAKEN)
    assert has_grown(run(engine)["s"])


def test_it_grows_as_far_as_there_is_room(checkpoint):
    engine = load(checkpoint, kv_cache_tokens=8)
    driver = Driver(engine, PROMPT, session="s")
    reply = grown(engine, driver, replace(CHAIN, max_depth=9, num_passes=9))
    assert len(reply.new_nodes) == 3, "two rows are left for guesses, and the last one needs none"


def test_beside_growth_that_goes_on_both_get_their_rows(engine):
    endless, ending = Driver(engine, PROMPT, session="endless"), Driver(engine, [9, 8, 7], session="ending")
    engine.add(endless.draft_request(replace(TREE, num_passes=0, min_path_prob=0.05)))
    reply = answer(engine, ending.draft_request(CHAIN))
    assert has_grown(reply)
    assert len(reply.new_nodes) == 4
