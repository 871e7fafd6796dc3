"""Figures of the runs of several systems, on runs made by hand."""

from __future__ import annotations

import pytest

from bench.harness.traffic import Arrival, Run
from bench.rounds.real import _results
from bench.rounds.ways import PIPELINED, PLAIN, SEQUENTIAL, STATIC
from protos.outrider.v1 import generation_pb2 as pb

TOKENS = (5, 6, 7, 8)


def call(kind, sent_s, received_s, computed_s, used=0, passes=1):
    timing = pb.Timing(computed_s=computed_s, passes=passes)
    return pb.CallTrace(call=kind, sent_s=sent_s, received_s=received_s, used=used, timing=timing)


def run(decode_s, tokens=TOKENS, drafts=()):
    """Verifications of a second each, 0.9 s of it computed."""
    verified = [call(pb.CALL_VERIFY, at_s, at_s + 1, 0.9, used=1) for at_s in (0, 2, 3.1, 5)]
    return Run(
        0.0,
        (Arrival(1.0, tokens[:1], 0), Arrival(1.0 + decode_s, tokens[1:], 1)),
        (*verified, *drafts),
        pb.SpeculationStats(),
    )


def repeat(pipelined_s=2.0, sequential_s=4.0, static_s=3.0, tokens=TOKENS):
    growth = call(pb.CALL_GROWTH, 2, 2.8, 0.7, used=2, passes=4)
    block = call(pb.CALL_BLOCK, 3, 3.1, 0.09 * 2, passes=2)
    return {
        PIPELINED: [run(pipelined_s, tokens, [growth])],
        SEQUENTIAL: [run(sequential_s)],
        STATIC: [run(static_s, drafts=[block])],
        PLAIN: [run(6.0)],
    }


def results(*repeats):
    return {result.name.partition(": ")[2]: result for result in _results("T = 0", repeats, {"threads": 1})}


def test_the_faster_sequential_system_is_what_pipelining_is_compared_with():
    found = results(repeat(), repeat(pipelined_s=1.5), repeat(pipelined_s=3.0))
    speed_up = found["pipelined over sequential"]
    assert (speed_up.value, speed_up.goal, speed_up.met) == (1.5, 1.25, True)
    assert speed_up.settings["against"] == STATIC
    assert (speed_up.settings["min"], speed_up.settings["max"]) == (1.0, 2.0)
    assert speed_up.settings["tokens_per_s"] == 2.0
    assert found["pipelined over plain"].value == 3.0
    assert found["sequential over plain"].value == 2.0
    assert results(repeat(sequential_s=2.4))["pipelined over sequential"].met is False


def test_rounds_are_taken_apart():
    """Two rounds: a hit of 1.1 s with 0.2 s around the model, and one of 1.9 s with 1.0 s, for which none was asked."""
    found = results(repeat())
    assert found["hit rate"].value == 1.0
    assert found["hit rate"].settings == {"rounds": 2, "asked": 1}
    assert found["draft time hidden on hits"].met is True
    assert found["tokens a round, pipelined"].value == 2.0
    assert found["not model time a round, pipelined"].value == pytest.approx(600)
    assert found["the same on hits"].value == pytest.approx(200)
    assert found["cost ratio c, served"].value == pytest.approx(0.1)


def test_one_completion_that_differs_misses_the_goal():
    unlike = results(repeat(), repeat(tokens=(5, 6, 7, 9)))["completions unlike plain decoding"]
    assert (unlike.value, unlike.met, unlike.settings["num_completions"]) == (1, False, 8)
    assert results(repeat())["completions unlike plain decoding"].met is True
