"""Figures of completions near and far, on runs made by hand."""

from __future__ import annotations

from bench.harness.traffic import Arrival, Run
from bench.rounds.ways import PIPELINED, SEQUENTIAL
from bench.service.distant import _results
from protos.outrider.v1 import generation_pb2 as pb

FAR_S = 0.01


def took(seconds: float) -> Run:
    return Run(0.0, (Arrival(1.0, (1,), 0), Arrival(1.0 + seconds, (2,), 0)), (), pb.SpeculationStats())


def test_rates_are_compared_prompt_by_prompt_and_far_over_near():
    """The machine took three times as long for the second prompt, near and far alike."""
    runs = {
        (PIPELINED, 0.0): [took(1.0), took(3.0)],
        (PIPELINED, FAR_S): [took(1.25), took(3.75)],
        (SEQUENTIAL, 0.0): [took(2.0), took(6.0)],
        (SEQUENTIAL, FAR_S): [took(4.0), took(12.0)],
    }
    results = {each.name: each for each in _results("draft", [runs], [took(1.0), took(1.0)], FAR_S)}
    far = results["pipelined: draft 10 ms away over one at hand"]
    assert (far.value, far.met, far.settings["num_runs"]) == (0.8, False, 2)
    assert results["sequential: draft 10 ms away over one at hand"].value == 0.5
    assert results["pipelined over sequential, draft at hand"].value == 2.0
    assert results["pipelined over sequential, draft 10 ms away"].value == 3.2


def verified(sent_s: float, received_s: float, guesses: int, used: int) -> pb.CallTrace:
    timing = pb.Timing(computed_s=received_s - sent_s - 0.002)
    return pb.CallTrace(
        call=pb.CALL_VERIFY, sent_s=sent_s, received_s=received_s, guesses=guesses, used=used, timing=timing
    )


def test_a_round_near_and_far_is_shown_by_its_parts():
    """The first verification is prefill and no round, and the last one has none behind it."""
    grown = pb.CallTrace(call=pb.CALL_GROWTH, sent_s=1.1, received_s=1.2, guesses=4, used=2)
    calls = (verified(0.0, 1.0, 0, 0), verified(1.0, 1.5, 3, 1), grown, verified(1.75, 2.0, 2, 0))
    late = (*calls[:-1], verified(1.75 + FAR_S, 2.0, 2, 0))
    near, far = ([Run(0.0, took(1.0).arrivals, each, pb.SpeculationStats())] for each in (calls, late))
    runs = {(way, at_s): far if at_s else near for way in (PIPELINED, SEQUENTIAL) for at_s in (0.0, FAR_S)}
    results = {each.name: each for each in _results("draft", [runs], [took(1.0)], FAR_S)}
    for where, then_ms in (("draft at hand", 250.0), ("draft 10 ms away", 260.0)):
        seen = results[f"{where}: hit rate"]
        assert seen.value == 1.0
        parts = {"rounds": 1, "tokens": 2, "guesses": 3, "draft_passes": 1}
        assert seen.settings == {**parts, "target_ms": 498.0, "way_ms": 2.0, "then_ms": then_ms}
