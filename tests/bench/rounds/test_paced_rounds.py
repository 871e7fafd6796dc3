"""Figures of paced runs, on runs made by hand; and the list of cases."""

from __future__ import annotations

import argparse

import pytest

from bench.harness.anatomy import rounds_of
from bench.harness.traffic import Arrival, Run
from bench.rounds import paced
from bench.rounds.paced import CASES, PacedPair, _results, add_arguments, parts
from bench.rounds.simulated import CHAINS
from bench.rounds.ways import PIPELINED, PLAIN, SEQUENTIAL, STATIC
from core.costs.pass_law import PASS_LAWS, PassLaw
from protos.outrider.v1 import generation_pb2 as pb

TOKENS = (5, 6, 7, 8)
LAW = PassLaw(((1, 0.5), (3, 0.7)))


def call(kind, sent_s, received_s, computed_s, waited_s=0.0, rows=1, used=0):
    timing = pb.Timing(waited_s=waited_s, computed_s=computed_s, passes=1, rows=rows)
    return pb.CallTrace(call=kind, sent_s=sent_s, received_s=received_s, used=used, timing=timing)


def verify(sent_s, received_s=None, rows=1):
    return call(pb.CALL_VERIFY, sent_s, received_s or sent_s + 0.8, 0.6, waited_s=0.05, rows=rows)


def run(decode_s, tokens=TOKENS, drafts=()):
    """Prefill, two rounds of 1 and 2 s, and a verification that is the last."""
    calls = (verify(0.0), verify(1.0), verify(2.0), verify(4.0), *drafts)
    arrivals = (Arrival(1.0, tokens[:1], 0), Arrival(1.0 + decode_s, tokens[1:], 1))
    return Run(0.0, arrivals, calls, pb.SpeculationStats())


def repeat(pipelined_s=2.0, static_s=3.0, plain_s=6.0, tokens=TOKENS):
    return {
        PIPELINED: [run(pipelined_s, tokens)],
        SEQUENTIAL: [run(2.6)],
        STATIC: [run(static_s)],
        PLAIN: [run(plain_s)],
    }


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(paced, "PASS_LAWS", {"70b": LAW, "1b": LAW})
    return PacedPair("70b", "1b", CHAINS, {0.0: 1.1}, {0.0: 1.4}, {0.0: 2.9}, {0.0: 0.3})


def results(case, *repeats, temperature=0.0):
    found = _results("title", case, temperature, repeats, {"static gamma": 4})
    return {result.name.partition(": ")[2]: result for result in found}


def test_pipelining_is_judged_against_the_best_in_turn_and_plain_against_the_law(case):
    """Plain: three tokens after the first chunk, of half a second each by the law, take 6 s."""
    found = results(case, repeat())
    judged = (
        "pipelined over the best static in turn",
        "pipelined over the best in turn",
        "pipelined over plain",
        "plain over 1/t_v",
    )
    assert [(found[name].value, found[name].goal, found[name].met) for name in judged] == [
        (1.5, 1.1, True),
        (1.3, 1.4, False),
        (3.0, 2.9, True),
        (0.25, 0.3, False),
    ]
    assert found["pipelined over the best in turn"].settings["recorded agreement"] == "target as 70b, draft as 1b"
    assert found["sequential over plain"].value == pytest.approx(6.0 / 2.6, abs=1e-3)


def test_where_no_goal_is_set_nothing_is_missed(case):
    found = results(case, repeat(), temperature=1.0)
    assert {result.goal for result in found.values()} == {None, 0}, "0 completions may be unlike plain"


def test_one_completion_that_differs_misses_the_goal(case):
    unlike = results(case, repeat(), repeat(tokens=(5, 6, 7, 9)))["completions unlike plain decoding"]
    assert (unlike.value, unlike.met) == (1, False)


def taken_apart(*drafts, rows=1):
    [round_] = rounds_of([verify(0.0), verify(1.0, rows=rows), verify(2.5), *drafts])
    return {name: pytest.approx(value) for name, value in parts(round_, LAW).items()}


def test_a_round_is_what_its_parts_are_together():
    assert taken_apart() == {
        "target pass": 0.5,
        "target beside its pass": 0.1,
        "target's queue": 0.05,
        "link": 0.15,
        "awaited draft": 0.0,
        "orchestrator": 0.7,
    }


def test_more_rows_take_the_pass_that_the_law_says():
    assert (taken_apart(rows=3)["target pass"], taken_apart(rows=3)["target beside its pass"]) == (0.7, -0.1)


def test_a_draft_that_answers_after_the_verdict_was_awaited():
    """The verdict is there at 1.8; growth that came before it, and some that came after the next block, was not."""
    block = call(pb.CALL_BLOCK, 1.9, 2.3, 0.3)
    apart = taken_apart(call(pb.CALL_GROWTH, 1.0, 1.7, 0.6), block, call(pb.CALL_GROWTH, 1.0, 2.9, 1.5))
    assert (apart["awaited draft"], apart["orchestrator"]) == (0.5, 0.2)


def test_hits_and_others_are_taken_apart_by_themselves(case):
    """One of two rounds continues with what grew."""
    growth = call(pb.CALL_GROWTH, 1.0, 1.7, 0.6, used=2)
    found = results(case, repeat() | {PIPELINED: [run(2.0, drafts=[growth])]})
    hit = found["a round beside its target pass, pipelined, hits"]
    other = found["a round beside its target pass, pipelined, others"]
    assert (hit.value, hit.settings["rounds"], hit.settings["orchestrator, ms"]) == (500.0, 1, 200.0)
    assert (other.value, other.settings["rounds"], other.settings["orchestrator, ms"]) == (1500.0, 1, 1200.0)
    assert found["a stream's time outside its rounds"].value == pytest.approx(1e3 * (2.0 - 4.0))


def test_every_case_has_goals_and_waits_in_both_engines():
    for case in CASES.values():
        config = case.config
        assert {config.target.engine.paced_as, config.draft.engine.paced_as} <= PASS_LAWS.keys()
        assert (case.over_static or case.over_in_turn)[0.0] > 1
    assert CASES["70b+1b-chains"].over_static[0.0] == pytest.approx(0.95 * 1.90)
    assert CASES["70b+1b-trees"].over_static[0.0] == pytest.approx(0.95 * 2.13, abs=1e-3)
    small = CASES["8b+0.5b"]
    assert (small.over_in_turn[0.0], small.over_plain[0.0], small.plain_share[0.0]) == (1.3, 2.2, 0.85)


def test_all_cases_are_measured_unless_some_are_named():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]).paced == [*CASES]
    assert parser.parse_args(["--paced", "8b+0.5b"]).paced == ["8b+0.5b"]
