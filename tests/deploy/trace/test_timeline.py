"""A picture of rounds shows calls whose times the test chooses."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.trace.timeline import Party, Slice, SliceKind, Stream, Timeline, timeline
from outrider_client import CallTrace, Chunk
from tests.deploy.trace.traces import STREAM, block, call, catch_up, chunk, grew, prefill, verify


def picture(*chunks: Chunk) -> Timeline:
    return timeline([Stream("s", 5.0, chunks)])


def of(shown: Timeline, *kinds: SliceKind, party: Party | None = None) -> list[Slice]:
    return [piece for piece in shown.slices if piece.kind in kinds and party in (None, piece.track.party)]


def spans(pieces: list[Slice]) -> list[tuple[str, float, float]]:
    return [(piece.name, piece.start_ns / 1e6, piece.end_ns / 1e6) for piece in pieces]


def arrows(shown: Timeline) -> list[tuple[str, float]]:
    """The origin of each arrow, and the time at which its end begins."""
    return [(arrow.made.name, arrow.used.start_ns / 1e6) for arrow in shown.arrows]


# Calls


def test_a_call_is_wire_queue_computing_wire():
    shown = picture(chunk("a", 1, prefill(10, 20, waited=1, computed=4)))
    assert spans(of(shown, SliceKind.CALL)) == [("prefill", 10, 20)]
    parts = [piece for piece in shown.slices if piece.depth == 1 and piece.track.party is Party.TARGET]
    assert spans(parts) == [("wire", 10, 12.5), ("queue", 12.5, 13.5), ("compute", 13.5, 17.5), ("wire", 17.5, 20)]


def test_what_was_computed_is_shared_out_between_kept_and_wasted():
    shown = picture(chunk("a", 3, verify(0, 10, 7, 2, waited=0, computed=8)))
    assert spans(of(shown, SliceKind.KEPT, SliceKind.WASTED)) == [
        ("kept 3 of 8 rows", 1, 4),
        ("wasted 5 of 8 rows", 4, 9),
    ]


@pytest.mark.parametrize(
    ("traced", "parts"),
    [
        (verify(0, 10, 3, 3, computed=8), ["kept 4 of 4 rows"]),
        (verify(0, 10, 3, 0, computed=8), ["kept 1 of 4 rows", "wasted 3 of 4 rows"]),
        (prefill(0, 10, computed=8), ["kept 1 of 1 rows"]),
        (grew(0, 10, 40, 8, computed=8), ["kept 8 of 40 nodes", "wasted 32 of 40 nodes"]),
        (grew(0, 10, 40, 0, computed=8), ["wasted 40 of 40 nodes"]),
        (grew(0, 10, 0, 0, computed=8), []),
        (catch_up(0, 10, computed=8), []),
        (prefill(0, 10), []),
    ],
)
def test_shares_are_named_by_their_rows(traced, parts):
    assert [piece.name for piece in of(picture(chunk("", 0, traced)), SliceKind.KEPT, SliceKind.WASTED)] == parts


def test_clocks_that_disagree_do_not_push_a_part_out_of_its_call():
    shown = picture(chunk("a", 1, prefill(0, 10, waited=6, computed=7)))
    parts = [piece for piece in shown.slices if piece.depth == 1 and piece.track.party is Party.TARGET]
    assert spans(parts) == [("queue", 0, 6), ("compute", 6, 10)]


def test_calls_are_named_by_what_came_of_them():
    shown = timeline([STREAM])
    assert [piece.name for piece in of(shown, SliceKind.CALL, party=Party.TARGET)] == [
        "prefill",
        "verify: 2 of 4 accepted",
        "verify: 4 of 4 accepted",
        "plain step",
    ]
    assert [piece.name for piece in of(shown, SliceKind.CALL, party=Party.DRAFT)] == [
        "catch up",
        "block of 4",
        "grew 30: hit",
        "grew 30",
        "block of 4: late",
    ]


# Rounds


def test_rounds_go_from_verdict_to_verdict_and_show_when_the_target_was_idle():
    shown = timeline([STREAM])
    assert spans(of(shown, SliceKind.ROUND)) == [
        ("round 0: 1 tokens", 0, 12),
        ("round 1: 3 tokens", 12, 26),
        ("round 2: 5 tokens", 26, 36),
        ("round 3: 1 tokens", 36, 60),
    ]
    assert spans(of(shown, SliceKind.IDLE)) == [("target idle", 0, 2), ("target idle", 12, 16), ("target idle", 36, 50)]
    assert [piece.facts["text"] for piece in of(shown, SliceKind.ROUND)] == ["a", "b c d", "e", "."]


def test_a_chunk_of_several_verdicts_gives_its_text_to_the_last():
    shown = picture(chunk("ab", 2, prefill(0, 1), verify(1, 2, 3, 1)))
    assert [piece.facts["text"] for piece in of(shown, SliceKind.ROUND)] == ["", "ab"]


def test_streams_stand_where_they_began():
    shown = timeline([Stream("late", 2.5, [chunk("a", 1, prefill(0, 1))]), Stream("early", 2.0, STREAM.chunks)])
    assert shown.streams == ("late", "early")
    starts = {
        piece.track.stream: piece.start_ns / 1e6 for piece in reversed(of(shown, SliceKind.CALL, party=Party.TARGET))
    }
    assert starts == {0: 500, 1: 2}


# Arrows


def test_an_arrow_joins_a_block_to_the_verification_that_it_went_to():
    assert arrows(timeline([STREAM])) == [("block of 4", 16), ("grew 30: hit", 26)]


def test_what_grew_before_a_verdict_is_used_after_it():
    shown = picture(chunk("", 1, verify(0, 30, 4, 1), grew(1, 5, 20, 3), verify(30, 40, 3, 0)))
    assert arrows(shown) == [("grew 20: hit", 30)]


def test_no_arrow_leads_past_a_verification_without_guesses():
    shown = picture(chunk("", 1, block(0, 5, 4), call("verify", 5, 10, 0, 0), verify(10, 20, 4, 1)))
    assert arrows(shown) == []


def test_a_block_that_came_while_the_target_was_verifying_has_no_arrow():
    late = block(0, 8, 4)
    assert arrows(picture(chunk("", 1, late, verify(5, 10, 3, 1), verify(10, 20, 3, 1)))) == []
    assert arrows(picture(chunk("", 1, late, verify(8, 10, 3, 1), verify(10, 20, 3, 1)))) == [("block of 4", 8)]


def test_a_block_that_nothing_was_made_of_has_no_arrow():
    assert arrows(picture(chunk("", 1, block(0, 5, 0), verify(5, 10, 3, 1)))) == []
    assert arrows(picture(chunk("", 1, block(0, 5, 3)))) == []


# Any trace

TIMES = st.integers(0, 40)
TIMED = st.none() | st.tuples(st.integers(0, 10), st.integers(0, 10))


@st.composite
def draft_calls(draw: st.DrawFn) -> CallTrace:
    kind = draw(st.sampled_from(["block", "growth", "prefill"]))
    sent, guesses, timed = draw(TIMES), draw(st.integers(0, 9)), draw(TIMED)
    return call(kind, sent, sent + draw(TIMES), guesses, draw(st.integers(0, guesses)), *timed or ())


@st.composite
def target_calls(draw: st.DrawFn) -> list[CallTrace]:
    """One after the other, as a session makes them."""
    calls, now = [], 0
    for pause, duration in draw(st.lists(st.tuples(TIMES, TIMES), max_size=5)):
        guesses, timed = draw(st.integers(0, 9)), draw(TIMED)
        used = draw(st.integers(0, guesses))
        calls.append(call("verify", now + pause, now + pause + duration, guesses, used, *timed or ()))
        now += pause + duration
    return calls


@settings(deadline=None)
@given(target_calls(), st.lists(draft_calls(), max_size=6))
def test_slices_of_a_track_nest_or_do_not_touch_whatever_was_traced(verified, drafted):
    shown = picture(*[chunk("x", 1, piece) for piece in verified], chunk("", 0, *drafted))
    assert sum(piece.kind is SliceKind.CALL for piece in shown.slices) == len(verified) + len(drafted)
    for piece in shown.slices:
        assert piece.start_ns <= piece.end_ns
    for one, other in combinations(shown.slices, 2):
        if one.track != other.track:
            continue
        inner, outer = (one, other) if one.depth > other.depth else (other, one)
        is_apart = one.end_ns <= other.start_ns or other.end_ns <= one.start_ns
        is_inside = outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns
        assert is_apart or (is_inside and inner.depth > outer.depth), (one, other)


@settings(deadline=None)
@given(target_calls(), st.lists(draft_calls(), max_size=6))
def test_every_arrow_goes_forward_in_time_to_a_verification_of_guesses(verified, drafted):
    shown = picture(chunk("x", 1, *verified, *drafted))
    for arrow in shown.arrows:
        assert arrow.made.end_ns <= arrow.used.start_ns
        assert arrow.made.track.party is Party.DRAFT
        assert arrow.used.name.startswith("verify: ")
