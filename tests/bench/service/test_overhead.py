"""Figures of runs and traces that are made by hand."""

from __future__ import annotations

from math import isnan
from types import SimpleNamespace

import pytest

from bench.harness.anatomy import rounds_of
from bench.service.overhead import (
    GAMMA,
    EngineReading,
    EngineWork,
    OverheadSample,
    _results,
    beside_models,
    verdict_to_next,
)
from protos.outrider.v1 import generation_pb2 as pb


def verify(sent_ms, received_ms, waited_ms, computed_ms):
    timing = pb.Timing(waited_s=waited_ms / 1e3, computed_s=computed_ms / 1e3, passes=1)
    return pb.CallTrace(call=pb.CALL_VERIFY, sent_s=sent_ms / 1e3, received_s=received_ms / 1e3, timing=timing)


def grew(sent_ms, received_ms, used):
    return pb.CallTrace(call=pb.CALL_GROWTH, sent_s=sent_ms / 1e3, received_s=received_ms / 1e3, used=used)


PREFILL = verify(0, 50, 1, 48)
TRACE = (
    *(PREFILL, grew(52, 58, 2)),  # the pass begins behind prefill, and its block goes out at 60
    *(verify(60, 70, 0.5, 9.3), grew(61, 69, 3)),  # link 0.2; the next block goes out 0.1 after the verdict
    *(verify(70.1, 80.1, 1.0, 8.6), grew(71, 79, 3)),  # link 0.4, then 0.3
    *(verify(80.4, 90.4, 0.0, 10.0), grew(81, 95, 3)),  # no hit: the pass is heard of 4.6 after the verdict
    *(verify(95.2, 105.2, 0.4, 9.0), grew(96, 104, 3)),  # link 0.6, then 0.5
    verify(105.7, 115, 0, 9),  # has no next block
)


def test_a_verdict_is_as_long_from_the_next_verification_as_link_and_orchestrator_take():
    """The three hits take 0.3, 0.7 and 1.1 ms; nine tenths of the way from the least to the most is 1.02."""
    result = verdict_to_next("drafted", rounds_of(TRACE))
    assert (result.value, result.unit, result.goal, result.met) == (0.7, "ms", 0.5, False)
    assert result.settings == {"hits": 3, "rounds": 4, "p90_ms": 1.02, "orchestrator, ms": 0.3, "link, ms": 0.4}


def test_without_a_hit_there_is_no_time_and_the_goal_is_missed():
    result = verdict_to_next("drafted", rounds_of([PREFILL, verify(60, 70, 0, 9), verify(71, 80, 0, 9)]))
    assert isnan(result.value)
    assert (result.met, result.settings) == (False, {"hits": 0, "rounds": 1})


def reading(forward_s, step_s, threads):
    return EngineReading(SimpleNamespace(forward_time_s=forward_s, step_time_s=step_s), threads)


def test_the_thread_that_computes_is_the_busiest_of_the_run_whatever_others_did_before():
    before, after = reading(1.0, 2.0, {7: 90.0, 8: 3.0}), reading(1.75, 3.0, {7: 90.1, 8: 3.8, 9: 0.2})
    work = before.until(after)
    assert (work.forward_s, work.step_s, work.thread_s) == (0.75, 1.0, pytest.approx(0.8))


def test_the_time_of_the_thread_is_shared_out_by_what_passes_and_steps_took():
    """A fifth of the time something else had the processor."""
    assert EngineWork(forward_s=0.75, step_s=1.0, thread_s=0.8).forward_cpu_s == pytest.approx(0.6)


def test_passes_take_no_more_processor_time_than_time_and_none_if_there_were_none():
    """Between its steps, too, the thread takes some."""
    assert EngineWork(forward_s=0.75, step_s=1.0, thread_s=1.1).forward_cpu_s == 0.75
    assert EngineWork(forward_s=0.0, step_s=0.0, thread_s=0.1).forward_cpu_s == 0.0


def test_engines_are_counted_without_their_forward_passes():
    """Ten rounds with 60 ms of passes, of 100 ms of all that the engine's process took."""
    cpu_ms = {"proxy": 0.5, "TargetActor": 10.0, "DraftActor": 2.0}
    work = {"TargetActor": EngineWork(0.075, 0.1, 0.08), "DraftActor": EngineWork(0.0, 0.0, 0.01)}
    left_ms = {process: round(ms, 6) for process, ms in beside_models(cpu_ms, work, 10).items()}
    assert left_ms == {"proxy": 0.5, "TargetActor": 4.0, "DraftActor": 2.0}


def sample(**changes):
    """Ten rounds of 8 ms, of which 5 are forward passes and 6 steps."""
    standard = {"wall_s": 0.08, "forward_s": 0.05, "step_s": 0.06, "num_rounds": 10.0, "num_tokens": 20}
    return OverheadSample(**{**standard, "cpu_ms": {"proxy": 1.5, "TargetActor": 3.0}, **changes})


def test_a_plain_step_is_judged_by_what_the_forward_passes_leave_of_it():
    results = {result.name: result for result in _results(0, 1, [sample(), sample(), sample(wall_s=0.2)])}
    outside = results["plain x1: all that is not model time"]
    assert (outside.value, outside.goal, outside.met) == (3.0, 1.5, False)
    names = ("forward passes", "sampling and bookkeeping", "Ray, orchestration, gRPC", "a round", "tokens a round")
    assert [results[f"plain x1: {name}"].value for name in names] == [5.0, 1.0, 2.0, 8.0, 2.0]


def test_processor_time_is_judged_and_a_drafted_round_has_no_time_outside_hidden_passes():
    results = {result.name: result for result in _results(GAMMA, 1, [sample(forward_s=0.2, step_s=0.3)])}
    assert results.keys() == {
        f"drafted x1: {name}" for name in ("a round", "tokens a round", "processor time of a round")
    }
    cpu = results["drafted x1: processor time of a round"]
    assert (cpu.value, cpu.goal, cpu.met, cpu.settings["proxy"]) == (4.5, 5.0, True, 1.5)


def test_of_many_streams_only_totals_are_given():
    assert [result.goal for result in _results(0, 16, [sample()])] == [None, None]
