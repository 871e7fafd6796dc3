"""A target keeps places that no guess had, of callers who allow it, to learn from; verdicts stay the same."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from core.config import EngineConfig
from core.records import Adapter, Sampling, Verification
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, Driver, chain, poisoned, wrong
from workers.engine.judging import JudgedJob
from workers.engine.target import TargetEngine
from workers.live import collector, files_after, read_kept

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLED = Sampling(temperature=0.9, seed=3)


def load(checkpoint, directory=None, **settings):
    config = EngineConfig(
        checkpoint,
        block_tokens=4,
        kv_cache_tokens=2048,
        learning_buffer=str(directory) if directory else None,
        **settings,
    )
    return TargetEngine.load(config, EPOCH, lambda _: None)


@pytest.fixture
def engine(checkpoint, tmp_path):
    return load(checkpoint, tmp_path)


@pytest.fixture(scope="module")
def plain(checkpoint):
    engine = load(checkpoint)
    return {
        sampling: Driver(engine, PROMPT, sampling, session=str(sampling)).run(40)
        for sampling in (Sampling(temperature=0.0), SAMPLED)
    }


def kept(engine, directory, *sessions):
    """The texts of these sessions, which end."""
    engine.release(sessions or ["s"])
    engine._learning.buffer.close()
    return read_kept(files_after(directory))


def test_missed_places_are_kept_with_the_target_s_likeliest_tokens(engine, plain, tmp_path):
    expected = plain[Sampling(temperature=0.0)]
    driver = Driver(engine, PROMPT)
    driver.verify()  # no guess: the first token
    driver.verify(chain(expected[1], expected[2], wrong(expected[3])))
    driver.verify(chain(expected[4], expected[5]))  # all are right: the token after them was not guessed
    driver.verify(chain(wrong(expected[7]), 9))
    (text,) = kept(engine, tmp_path)
    assert text.token_ids == PROMPT + expected[:8]
    assert (text.first, text.num_chosen) == (6, 8)
    assert [place - 6 for place in text.missed] == [0, 3, 7]
    assert [ids[0] for ids in text.top_ids] == [expected[0], expected[3], expected[7]]
    assert (text.num_accepted, text.num_rejected, text.temperature) == (4, 2, 0.0)
    for ids, logprobs in zip(text.top_ids, text.top_logprobs, strict=True):
        assert len(set(ids)) == len(logprobs) == 16
        assert max(ids) < VOCAB_SIZE + 4
        assert logprobs == sorted(logprobs, reverse=True)


def test_probabilities_are_the_model_s_own(engine, checkpoint, tmp_path):
    spec = Driver(engine, PROMPT, Sampling(temperature=0.0), num_logprobs=16)
    verdict = spec.verify()
    (text,) = kept(engine, tmp_path)
    top = verdict.logprobs[0].top
    assert text.top_ids[0] == [token for token, _ in top]
    assert text.top_logprobs[0] == pytest.approx([logprob for _, logprob in top], abs=1e-3)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), SAMPLED])
@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION])
def test_no_token_changes(engine, checkpoint, sampling, verification, tmp_path):
    """With the same guesses, wrong and right."""
    engines, logs = (engine, load(checkpoint)), []
    for each in engines:
        driver = Driver(each, PROMPT, sampling, verification)
        for number in range(12):
            block = chain(number, 7) if not driver.spec.needs_q else chain()
            driver.verify(block)
        logs.append(list(driver.log.tokens))
    assert logs[0] == logs[1]
    (text,) = kept(engine, tmp_path)
    assert text.token_ids == logs[0]


@pytest.mark.parametrize(
    "change",
    [
        {"learning": False},
        {"adapter": Adapter("a", "/a", "sha256:00")},
        {"verification": Verification.LENIENT_COUPLED},
    ],
)
def test_nothing_is_kept_of_callers_who_opt_out_nor_of_adapters(engine, tmp_path, change):
    engine._adapters["sha256:00"] = 0  # served by the model's own weights
    driver = Driver(engine, PROMPT)
    driver.spec = replace(driver.spec, **change)
    driver.verify()
    driver.verify(chain(1, 2))
    other = Driver(engine, PROMPT[::-1], session="other")
    other.spec = replace(other.spec, learning=True)
    other.verify()
    texts = kept(engine, tmp_path, "s", "other")
    assert [text.token_ids[:6] for text in texts] == [PROMPT[::-1]]


def test_it_costs_nothing_when_it_is_off(checkpoint):
    """No row is read and no thread is started."""
    with (
        patch.object(JudgedJob, "end", side_effect=AssertionError),
        patch("workers.live.buffer.threading.Thread", side_effect=AssertionError),
    ):
        engine = load(checkpoint)
        driver = Driver(engine, PROMPT)
        driver.verify()
        driver.verify(chain(1, 2))
        engine.release(["s"])
        assert engine.stats().num_kept_tokens == 0


def test_a_long_text_is_kept_in_parts_with_their_context(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "CONTEXT_TOKENS", 8)
    monkeypatch.setattr(collector, "PART_TOKENS", 24)
    driver = Driver(engine, [7] * 30)
    driver.run(20)
    texts = kept(engine, tmp_path)
    log = list(driver.log.tokens)
    assert [(text.first, len(text.token_ids)) for text in texts] == [(8, 24), (8, 12)]
    assert texts[0].token_ids == log[22:46]
    assert texts[1].token_ids == log[38:50]


def test_a_session_that_lost_its_kv_goes_on_with_its_text(engine, tmp_path):
    driver = Driver(engine, PROMPT)
    driver.run(3)
    engine._store.drop("s")
    driver.held = 0
    driver.run(3)
    (text,) = kept(engine, tmp_path)
    assert text.token_ids == list(driver.log.tokens)
    assert [place - 6 for place in text.missed] == [0, 1, 2, 3, 4, 5]


def test_a_session_that_says_something_else_begins_another_text(engine, tmp_path):
    driver = Driver(engine, PROMPT)
    driver.run(3)
    engine._store.drop("s")
    other = Driver(engine, PROMPT[:3])
    other.round = driver.round
    other.run(2)
    texts = kept(engine, tmp_path)
    assert [text.token_ids[: text.first] for text in texts] == [PROMPT, PROMPT[:3]]


def test_nothing_is_kept_of_scores_that_are_no_numbers(engine, tmp_path):
    driver = Driver(engine, PROMPT)
    driver.verify()
    with poisoned(engine, 1):
        driver.verify(chain(1))
    driver.verify()
    texts = kept(engine, tmp_path)
    assert all(place for text in texts for place in text.missed)
    assert sum(text.num_chosen for text in texts) == 2


def test_silent_sessions_are_kept_when_they_expire(checkpoint, tmp_path):
    engine = load(checkpoint, tmp_path, session_timeout_s=1e-9)
    Driver(engine, PROMPT).run(2)
    assert engine.expire() == ["s"]
    engine._learning.buffer.close()
    assert [text.num_chosen for text in read_kept(files_after(tmp_path))] == [2]
    assert engine.stats().num_kept_tokens == 2
