"""Sources in an engine: whose KV is whose, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driving import Driver, answer, chain

from core.config import EngineConfig
from core.records import Refused
from tests.checkpoints import write
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

START = 0
PREFIX = [9, 8, 7, 6]


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory):
    return str(write("mt5", tmp_path_factory.mktemp("mt5")))


@pytest.fixture
def engine(seq2seq):
    config = EngineConfig(seq2seq, kv_cache_tokens=512, block_tokens=4, max_context_tokens=40)
    return TargetEngine.load(config, 7, lambda _: None)


def driver(engine, source, session="s", prefix=PREFIX):
    found = Driver(engine, [*source, START, *prefix], session=session)
    found.spec = replace(found.spec, num_source=len(source))
    return found


def test_rejected_guesses_leave_nothing_behind(engine):
    source = list(range(20, 33))
    want = driver(engine, source, "plain").run(8)
    guessing = driver(engine, source, "guessing")
    got = []
    while len(got) < 8:
        right = want[len(got) : len(got) + 2]
        verdict = guessing.verify(chain(*right, 99, 98))
        got += [*right[: len(verdict.path)], verdict.next_token]
    assert got[:8] == want


@pytest.mark.parametrize("other", [[21, *range(21, 33)], [*range(20, 32), 99], list(range(20, 30))])
def test_a_session_that_comes_back_with_another_source_keeps_nothing(engine, other):
    """Tokens at the beginning of both are the same, but their keys depend on the whole source."""
    want = driver(engine, other, "alone").run(6)
    engine.release(["alone"])
    first = driver(engine, list(range(20, 33)))
    first.run(3)
    second = driver(engine, other)
    second.round = first.round
    assert second.run(6) == want


def test_a_text_that_goes_back_keeps_its_source(engine):
    source = list(range(20, 33))
    first = driver(engine, source)
    want = first.run(5)
    again = driver(engine, source)
    again.round = first.round
    assert again.run(5) == want
    assert engine._runtime._sources.num_passes == 1


@pytest.mark.parametrize(("source", "problem"), [([], "0 tokens"), ([5] * 41, "41 tokens")])
def test_a_source_that_the_encoder_does_not_read_is_refused(engine, source, problem):
    reply = answer(engine, driver(engine, source).verify_request())
    assert isinstance(reply, Refused)
    assert reply.field == "source"
    assert problem in reply.reason


def test_a_source_alone_is_refused(engine):
    alone = driver(engine, [5, 6, 7])
    alone.spec = replace(alone.spec, num_source=len(alone.log))
    assert "nothing follows" in answer(engine, alone.verify_request()).reason


def test_the_context_is_that_of_the_decoder(engine):
    """40 positions of its own after a source of any length."""
    long = driver(engine, [5] * 38, prefix=[6] * 38)
    assert not isinstance(answer(engine, long.verify_request(chain(1))), Refused)
    reply = answer(engine, driver(engine, [5] * 38, "longer", [6] * 39).verify_request(chain(1)))
    assert "exceed the context" in reply.reason


def test_a_draft_grows_up_to_the_end_of_the_decoders_context(seq2seq):
    config = EngineConfig(seq2seq, kv_cache_tokens=512, max_context_tokens=40)
    engine = DraftEngine.load(config, 7, 64, lambda _: None)
    assert len(driver(engine, [5] * 38, prefix=[6] * 34).draft(4)) == 4
