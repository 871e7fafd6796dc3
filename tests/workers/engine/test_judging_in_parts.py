"""A wide step is judged some rows at a time, for its memory; what comes of it is what comes of all rows at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.records import Continuation, Sampling, Stamp, Verdict
from core.speculation.token_tree import EMPTY_BLOCK
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, Driver, chain, poisoned, step, wrong
from workers.engine import judging
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]
MOST_ROWS = 8
NUM_ROWS = sum(1 + number % 4 for number in range(9))


def load(checkpoint):
    return TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512), EPOCH, lambda _: None)


@pytest.fixture
def engine(checkpoint):
    return load(checkpoint)


@pytest.fixture
def judged(monkeypatch):
    """The numbers of rows that were judged at a time, in steps that are judged in parts."""
    monkeypatch.setattr(judging, "JUDGED_SCORES", MOST_ROWS * VOCAB_SIZE)
    numbers = []
    prepare_adjustment = judging.prepare_adjustment

    def counted(rows, *args):
        adjust = prepare_adjustment(rows, *args)

        def adjusted(logits):
            numbers.append(len(rows))
            assert logits.shape[0] == len(rows)
            return adjust(logits)

        return adjusted

    monkeypatch.setattr(judging, "prepare_adjustment", counted)
    return numbers


def begun(engine):
    """Sessions of several kinds after their prompts, and blocks of up to three guesses, the last of them wrong."""
    drivers = [Driver(engine, PROMPT, s, session=f"{n}", num_logprobs=2) for n, s in enumerate(SAMPLINGS * 3)]
    texts = [Driver(engine, PROMPT, s, session=f"text {n}").run(5) for n, s in enumerate(SAMPLINGS)] * 3
    for driver in drivers:
        driver.verify()
    lengths = [number % 4 for number in range(len(drivers))]
    blocks = [
        chain(*text[1:length], wrong(text[length])) if length else EMPTY_BLOCK
        for text, length in zip(texts, lengths, strict=True)
    ]
    return drivers, blocks


def verdicts(engine, drivers, blocks):
    """Verdicts of one step."""
    for driver, block in zip(drivers, blocks, strict=True):
        engine.add(driver.verify_request(block))
    replies = step(engine)
    engine.check_integrity()
    return [replies[driver.session] for driver in drivers]


def without_time(replies):
    return [replace(reply, timing=None) for reply in replies]


def test_parts_are_small_and_have_the_verdicts_of_the_whole(checkpoint, engine, monkeypatch, judged):
    drivers, blocks = begun(engine)
    judged.clear()
    in_parts = verdicts(engine, drivers, blocks)
    assert sum(judged) == NUM_ROWS
    assert max(judged) <= MOST_ROWS < NUM_ROWS
    monkeypatch.setattr(judging, "JUDGED_SCORES", 1 << 24)
    other = load(checkpoint)
    drivers, blocks = begun(other)
    judged.clear()
    assert without_time(in_parts) == without_time(verdicts(other, drivers, blocks))
    assert judged == [NUM_ROWS]
    assert [len(verdict.path) for verdict in in_parts] == [max(0, len(block) - 1) for block in blocks]


def test_a_block_of_more_rows_than_a_part_is_judged_whole(engine, judged):
    text = Driver(engine, PROMPT, session="text").run(12)
    driver = Driver(engine, PROMPT)
    driver.verify()
    judged.clear()
    assert driver.verify(chain(*text[1:11])).next_token == text[11]
    assert judged == [11]


def test_a_row_without_a_law_in_a_later_part_spoils_its_own_sequence_alone(checkpoint, engine, judged):
    other = load(checkpoint)
    expected = verdicts(other, *begun(other))
    drivers, blocks = begun(engine)
    bad = len(drivers) - 1
    with poisoned(engine, NUM_ROWS - 1 - len(blocks[bad])):
        found = verdicts(engine, drivers, blocks)
    assert found[bad].is_final
    assert [reply.path for reply in found[:bad]] == [reply.path for reply in expected[:bad]]
    assert len(judged) > 2


def test_sessions_of_several_parts_go_on_together_or_none_does(engine, judged):
    drivers, _ = begun(engine)
    blocks = [EMPTY_BLOCK] * len(drivers)
    judged.clear()
    for offering in (drivers[:-1], drivers):
        for driver in drivers:
            engine.add(driver.verify_request())
        for driver in offering:
            after, driver.round = driver.round, driver.round + 1
            engine.add(Continuation(Stamp(driver.session, EPOCH, driver.round), after, EMPTY_BLOCK, is_open=True))
        found = {reply.stamp.lease: reply for reply in engine.step() if isinstance(reply, Verdict)}
        replies = [found[driver.session] for driver in drivers]
        continued = [reply.continued > 0 for reply in replies]
        assert continued == [offering is drivers] * len(blocks)
        for driver, reply in zip(drivers, replies, strict=True):
            driver.log.extend([reply.next_token])
            driver.held = reply.held
    assert len(judged) == 4, "two parts in each of two steps"
