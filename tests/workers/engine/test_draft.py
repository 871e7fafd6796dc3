"""The draft engine: its guesses are what it would decode by itself, however it was rolled back before."""

from __future__ import annotations

import pytest

from core.config import EngineConfig
from core.exact.sampling import draw_guess
from core.records import Refused, Sampling, Verification
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, poisoned, step, tree_of, wrong
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLED = Sampling(temperature=0.9, seed=3, repetition_penalty=1.2)
THREE_TOKENS = ((7, 60.0), (8, 60.0), (9, 60.0))
TAKING_TURNS = [
    Sampling(temperature=temperature, seed=3, frequency_penalty=2.0, logit_bias=THREE_TOKENS)
    for temperature in (0.0, 0.7)
]
"""Three tokens share the output, and each is the less likely the oftener it was said, guesses included."""
NOT_TWICE = [
    Sampling(temperature, seed=3, allowed_token_ids=(7, 8, 9), bad_words=((7, 7), (8, 8), (9, 9), (7, 8, 9)))
    for temperature in (0.0, 0.7)
]
"""Three tokens are allowed, and none may follow itself, guesses included."""


@pytest.fixture
def config(checkpoint):
    return EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512)


@pytest.fixture
def engine(config):
    return DraftEngine.load(config, EPOCH, 16, lambda _: None)


@pytest.fixture
def target(config):
    return TargetEngine.load(config, EPOCH, lambda _: None)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), SAMPLED, *TAKING_TURNS, *NOT_TWICE])
def test_a_draft_with_the_targets_weights_guesses_exactly_what_the_target_says(engine, target, sampling):
    """At a temperature, too: both draw with the same noise."""
    expected = Driver(target, PROMPT, sampling).run(16)
    drafting = Driver(engine, PROMPT, sampling)
    assert list(drafting.draft(5).tokens) == expected[:5]
    drafting.log.extend(expected[:6])
    assert list(drafting.draft(3).tokens) == expected[6:9], "all accepted, and the bonus token"
    drafting.log.extend([expected[6], expected[7]])
    assert list(drafting.draft(8).tokens) == expected[8:16]


def test_rejected_guesses_leave_nothing_behind(engine, target):
    """After a correction the guesses are those of an engine that never guessed wrong (the stale-KV bug)."""
    drafting = Driver(engine, PROMPT)
    guesses = drafting.draft(6).tokens
    drafting.log.extend([guesses[0], wrong(guesses[1])])
    after_correction = drafting.draft(6).tokens
    fresh = Driver(engine, [*PROMPT, guesses[0], wrong(guesses[1])], session="fresh")
    assert after_correction == fresh.draft(6).tokens


def test_accepted_guesses_are_not_computed_again(engine):
    drafting = Driver(engine, PROMPT)
    guesses = drafting.draft(6).tokens
    rows = engine.stats().num_rows
    drafting.log.extend([*guesses[:4], wrong(guesses[4])])
    drafting.draft(1)
    assert engine.stats().num_rows == rows + 1, "only the correction is new"


def test_the_first_guess_comes_with_prefill(engine):
    drafting = Driver(engine, PROMPT)
    drafting.draft(1)
    assert engine.stats().num_rows == len(PROMPT)
    drafting.log.extend([9])
    drafting.draft(1)
    assert engine.stats().num_rows == len(PROMPT) + 1


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_guesses_carry_the_q_they_were_drawn_from(engine, verification):
    block = Driver(engine, PROMPT, SAMPLED, verification).draft(6)
    assert len(block.q) == 6
    for token, q in zip(block.tokens, block.q, strict=True):
        assert token in q.token_ids
        assert len(q.token_ids) <= 16
        assert sum(q.probs) == pytest.approx(1, abs=1e-5)
    assert Driver(engine, PROMPT, Sampling(temperature=0.0), verification, session="greedy").draft(3).q == ()


def test_blocks_of_many_sessions_grow_together(engine):
    alone = {n: Driver(engine, [n, *PROMPT], session=f"alone {n}").draft(4).tokens for n in range(5)}
    steps = engine.stats().num_steps
    drivers = [Driver(engine, [n, *PROMPT], session=f"together {n}") for n in alone]
    replies = answer_all(engine, [driver.draft_request(4) for driver in drivers])
    assert {n: tree_of(reply).tokens for n, reply in zip(alone, replies, strict=True)} == alone
    assert engine.stats().num_steps == steps + 4


def test_a_model_that_gives_nan_refuses_that_sequence_alone(engine):
    expected = Driver(engine, PROMPT, session="before").draft(1).tokens
    engine.add(Driver(engine, PROMPT, session="a").draft_request(1))
    engine.add(Driver(engine, PROMPT, session="b").draft_request(1))
    with poisoned(engine, 0):
        replies = step(engine)
    assert isinstance(replies["a"], Refused)
    assert tree_of(replies["b"]).tokens == expected
    engine.check_integrity()


def test_release_frees_a_block_in_the_making(engine):
    engine.add(Driver(engine, PROMPT).draft_request(8))
    engine.step()
    engine.release(["s"])
    assert isinstance(step(engine)["s"], Refused)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert answer(engine, Driver(engine, PROMPT, session="next").draft_request(1)).new_nodes


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_each_guess_is_drawn_with_the_noise_of_its_place_in_the_block(engine, verification):
    """The second trap of docs/exactness.md, in the engine: keyed without the place, all but the first would differ."""
    block = Driver(engine, PROMPT, SAMPLED, verification).draft(6)
    for place, (token, q) in enumerate(zip(block.tokens, block.q, strict=True)):
        assert token == draw_guess(q, VOCAB_SIZE, SAMPLED.seed, len(PROMPT) + place, place)


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_a_draft_says_the_q_of_its_own_temperature(engine, verification):
    """Not that of the target's: the fourth trap of docs/exactness.md, which no ratio p / q would show."""
    said = {}
    for name, temperature in (("target's", None), ("own", 0.4)):
        driver = Driver(engine, PROMPT, Sampling(temperature=1.0, seed=3), verification, session=name)
        driver.spec = driver.spec.of_draft(temperature)
        said[name] = driver.draft(1).q[0]
    probs = dict(zip(said["target's"].token_ids, said["target's"].probs, strict=True))
    sharpened = {token: probs[token] ** (1 / 0.4) for token in said["own"].token_ids}
    total = sum(sharpened.values())
    for token, prob in zip(said["own"].token_ids, said["own"].probs, strict=True):
        assert prob == pytest.approx(sharpened[token] / total, rel=1e-4)
    assert max(said["own"].probs) > max(probs.values())


def test_at_a_draft_temperature_the_targets_noise_is_shared_all_the_same(engine, target):
    """With the target's weights and nearly its temperature nearly all guesses are its tokens; far from it few are."""
    sampling = Sampling(temperature=1.0, seed=3)
    expected = Driver(target, PROMPT, sampling).run(24)
    num_right = {}
    for temperature in (0.95, 20.0):
        driver = Driver(engine, PROMPT, sampling, session=f"at {temperature}")
        driver.spec = driver.spec.of_draft(temperature)
        num_right[temperature] = 0
        for token in expected:
            num_right[temperature] += driver.draft(1).tokens[0] == token
            driver.log.extend([token])
    assert num_right[0.95] > 18 > num_right[20.0]


def test_a_draft_with_fewer_ids_refuses_those_it_does_not_have(engine):
    assert isinstance(answer(engine, Driver(engine, [*PROMPT, VOCAB_SIZE]).draft_request(2)), Refused)
    assert answer(engine, Driver(engine, PROMPT, session="next").draft_request(1)).new_nodes
