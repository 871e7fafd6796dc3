"""Reports and estimates of an engine whose passes wait."""

from __future__ import annotations

import logging

from core.config import EngineConfig
from core.costs.pass_law import PASS_LAWS, PassLaw
from core.records import Findings
from tests.workers.engine.driving import EPOCH, Driver
from workers.engine.target import TargetEngine
from workers.runtime.pacer import Pacer

PROMPT = [5, 17, 99, 4]
STEP_TIMES_S = ((1, 0.001), (16, 0.004), (64, 0.016), (256, 0.032))
"""Pass times of a machine on which each row costs."""


def load(checkpoint, paced_as):
    config = EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512, paced_as=paced_as)
    return TargetEngine.load(config, EPOCH, lambda _: None)


def warmed_up(checkpoint, paced_as, step_times_s=STEP_TIMES_S):
    engine = load(checkpoint, paced_as)
    known = Findings("here", is_compiled=True, tile_rows=None, step_times_s=step_times_s)
    engine.warm_up(lambda _: None, "here", known)
    return engine


def test_an_engine_says_what_its_passes_take_as_they_are_paced(checkpoint):
    law = PASS_LAWS["70b"]
    paced = tuple((rows, max(seconds, law(rows))) for rows, seconds in STEP_TIMES_S)
    assert warmed_up(checkpoint, "70b").info.step_times_s == paced
    assert warmed_up(checkpoint, None).info.step_times_s == STEP_TIMES_S


def test_what_an_engine_says_of_its_passes_contains_the_wait(checkpoint):
    engine = load(checkpoint, "70b")
    law = PASS_LAWS["70b"]
    verdict = Driver(engine, PROMPT).verify()
    assert verdict.timing.computed_s >= law(len(PROMPT))
    assert engine.stats().forward_time_s >= law(len(PROMPT))


def test_outputs_are_the_same(checkpoint):
    plain, paced = (Driver(load(checkpoint, name), PROMPT).run(8) for name in (None, "0.5b"))
    assert plain == paced


def test_passes_that_are_too_long_for_the_law_are_counted(checkpoint, monkeypatch):
    monkeypatch.setattr("workers.runtime.pacer.PASS_LAWS", {"1b": PassLaw(((1, 0.0),))})
    engine = load(checkpoint, "1b")
    Driver(engine, PROMPT).run(4)
    assert engine.stats().num_overruns == engine.stats().num_steps > 0
    assert load(checkpoint, None).stats().num_overruns == 0


def test_an_engine_starts_without_waiting_and_knows_how_long_its_passes_will_be(checkpoint, monkeypatch):
    waits = []
    monkeypatch.setattr(Pacer, "wait", lambda *args: waits.append(args))
    assert [warmed_up(checkpoint, name)._pace.chunk_rows(1) for name in (None, "70b")] == [8, 256]
    assert waits == []


def test_steps_that_this_machine_takes_longer_for_are_named_at_start(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, "workers.runtime.pacer"):
        warmed_up(checkpoint, "8b")
        assert caplog.messages == ["paced as 8b, but steps of 64, 256 rows take longer on this machine"]
        caplog.clear()
        warmed_up(checkpoint, "70b", STEP_TIMES_S[:3])
        assert caplog.messages == []
