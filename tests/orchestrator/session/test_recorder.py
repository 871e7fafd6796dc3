"""One observer: what it is told is counted, and traced and explained where a client asks; it decides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.records import (
    Call,
    CallTrace,
    Chunk,
    FinishReason,
    SourceStats,
    SpeculationStats,
    Stamp,
    Timing,
    Usage,
    Verdict,
)
from core.speculation import EMPTY_PART, ROOT, UNRANKED, TokenTree
from orchestrator.policy import Found, Shape
from orchestrator.session.recorder import Recorder
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.verdicts import JudgedBlock
from tests.orchestrator.fakes import request
from tests.orchestrator.world import FaultyWorld

MIDDLE = Chunk("", (5,), (False,), Usage(3, 1))
LAST = replace(MIDDLE, finish_reason=FinishReason.LENGTH)
TIMING = Timing(0.0, 2.0, 1, 1)
SHAPE = Shape((ROOT, 0, ROOT), (0, UNRANKED, UNRANKED), (0.9,) * 3)
SOURCED = SourcedBlock(TokenTree((5, 6, 7), SHAPE.parents), SHAPE, ("draft", "a", "b"))


def judged(sent_s, path, *, is_continued=False):
    verdict = Verdict(Stamp("t", 1, 1), path, 9, held=3, timing=TIMING)
    return JudgedBlock(SOURCED, verdict, sent_s, sent_s + 10.0, None, is_continued)


def a_stream(**asked):
    """Two rounds of 10 s from 100 s on, with a pass of the draft in each, and failures of every kind."""
    recorder = Recorder(**asked)
    recorder.started(100.0)
    extra = recorder.for_extra_draft("a")
    recorder.target_leased(3)
    recorder.pass_made(2, TIMING, 102.0)
    recorder.pass_made(4, TIMING, 109.0)
    recorder.block_judged(judged(100.0, (0, 1)))
    recorder.next_block_found(Found.HIT)
    recorder.guesses_used(1)
    recorder.block_sent(EMPTY_PART, lambda: "nothing has grown")
    recorder.draft_replied(CallTrace(Call.BLOCK, 110.0, 113.0, 2))
    recorder.block_judged(judged(111.0, (), is_continued=True))
    recorder.next_block_found(Found.MISS)
    recorder.draft_was_late(is_left=False)
    recorder.draft_was_late(is_left=True)
    recorder.draft_lost("it is silent")
    extra.draft_lost("its engine is gone")
    extra.pass_made(8, TIMING, 120.0)
    recorder.target_lost("moved", is_failure=False)
    recorder.target_lost("killed", is_failure=True)
    return recorder


COUNTED = SpeculationStats(
    num_rounds=2,
    num_drafted_tokens=6,
    num_accepted_tokens=2,
    num_draft_rounds=2,
    accepted_per_position=(1, 1),
    num_draft_failures=3,
    num_target_failures=1,
    num_lookup_tokens=2,
    sources=(SourceStats("a", 2, 1), SourceStats("b", 2, 0), SourceStats("draft", 2, 1)),
    num_continued=1,
    num_hits=1,
    num_misses=1,
    draft_time_s=7.0,
    hidden_draft_time_s=6.0,
)
"""Drafting takes 2, 2 and 3 s. Nothing hides the first second of the block, from 110 to 111 s."""


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("is_explained", [True, False])
def test_the_last_chunk_has_what_was_counted_whatever_else_was_asked_for(is_traced, is_explained):
    recorder = a_stream(is_traced=is_traced, is_explained=is_explained)
    assert recorder.add_to(MIDDLE).stats is None
    assert recorder.add_to(LAST).stats == COUNTED


def test_a_trace_counts_from_the_beginning_of_the_stream_and_is_given_once():
    recorder = a_stream(is_traced=True)
    chunk = recorder.add_to(MIDDLE)
    assert [(each.call, each.sent_s, each.received_s, each.num_guesses, each.num_used) for each in chunk.trace] == [
        (Call.GROWTH, 0.0, 2.0, 2, 0),
        (Call.VERIFY, 0.0, 10.0, 3, 2),
        (Call.GROWTH, 7.0, 9.0, 4, 1),
        (Call.BLOCK, 10.0, 13.0, 2, 0),
        (Call.VERIFY, 11.0, 21.0, 3, 0),
    ]
    assert chunk.began_s == 100.0
    assert recorder.add_to(LAST).trace == ()


def test_an_explanation_is_given_once_and_says_why():
    recorder = a_stream(is_explained=True)
    assert recorder.add_to(MIDDLE).explanation == (
        "prefill: a target takes in 3 tokens, and no guesses; 2 accepted",
        "round 1: no guesses: nothing has grown; 0 accepted",
        "the draft was left, as it is silent; another is asked",
        "the target was left (moved), and another is asked",
        "the target was left (killed), and another is asked",
    )
    assert recorder.add_to(LAST).explanation == ()


def test_who_asks_for_neither_gets_neither_and_no_reason_is_worked_out():
    recorder = Recorder()
    recorder.turn_skipped(pytest.fail)
    recorder.draft_awaited(pytest.fail, 1.0)
    recorder.block_sent(EMPTY_PART, pytest.fail)
    assert a_stream().add_to(MIDDLE) == MIDDLE


def commands(seed, tokenizer, **asked):
    """All that a session sends through the same faults, without what its observer adds to chunks."""
    world = (
        FaultyWorld(seed, request(max_tokens=30, **asked), tokenizer, guessers=("draft", "prompt_lookup")).start().run()
    )
    bare = {"trace": (), "began_s": 0.0, "explanation": (), "stats": None}
    return [repr(replace(each, **bare)) if isinstance(each, Chunk) else repr(each) for each in world.sent]


@pytest.mark.parametrize("seed", range(30))
def test_an_observer_changes_no_command_of_a_session(tokenizer, monkeypatch, seed):
    plain = commands(seed, tokenizer)
    assert commands(seed, tokenizer, wants_trace=True, wants_explanation=True) == plain
    for name in vars(Recorder):
        if not name.startswith("_") and name not in ("for_extra_draft", "add_to"):
            monkeypatch.setattr(Recorder, name, lambda *_, **__: None)
    assert commands(seed, tokenizer) == plain
