"""Where a round's time went, on traces made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.anatomy import hidden_share, rounds_of, waiting_share
from protos.outrider.v1 import generation_pb2 as pb


def call(kind, sent_s, received_s, computed_s=0.0, used=0, waited_s=0.0, passes=1):
    timing = pb.Timing(waited_s=waited_s, computed_s=computed_s, passes=passes)
    return pb.CallTrace(call=kind, sent_s=sent_s, received_s=received_s, used=used, timing=timing)


def verify(sent_s, received_s, computed_s=0.0, used=0, **rest):
    return call(pb.CALL_VERIFY, sent_s, received_s, computed_s, used, **rest)


def grew(sent_s, received_s, computed_s=0.0, used=0, **rest):
    return call(pb.CALL_GROWTH, sent_s, received_s, computed_s, used, **rest)


def block(sent_s, received_s, computed_s=0.0, **rest):
    return call(pb.CALL_BLOCK, sent_s, received_s, computed_s, **rest)


PREFILL = verify(0.0, 1.0, 0.9)


def test_prefill_is_no_round_and_the_last_verification_has_no_next_block():
    rounds = rounds_of([PREFILL, verify(2, 3), verify(4, 5), verify(6, 7)])
    assert [(round_.verify.sent_s, round_.end_s) for round_ in rounds] == [(2, 4), (4, 6)]
    assert rounds_of([]) == rounds_of([PREFILL]) == rounds_of([PREFILL, verify(2, 3)]) == []


def test_a_round_on_a_hit_is_one_call_and_what_is_not_model_is_the_rest_of_it():
    (round_,) = rounds_of([PREFILL, verify(2, 2.5, 0.4, used=3), grew(2, 2.4, 0.35, used=4), verify(2.52, 3)])
    assert round_.is_hit
    assert round_.was_asked
    assert round_.num_tokens == 4
    assert round_.not_model_s == pytest.approx(0.52 - 0.4)


def test_a_quick_pass_is_hidden_by_the_verification_behind_which_it_was_heard_of():
    """It is nearer to the sending of the next block, which is its doing."""
    (round_,) = rounds_of([PREFILL, verify(2, 3, 0.9), grew(2.8, 2.9, 0.1, used=4), verify(3.01, 4)])
    assert round_.is_hit
    assert hidden_share([round_]) == pytest.approx(1.0)


def test_time_in_an_engines_queue_is_not_model_time():
    (round_,) = rounds_of([PREFILL, verify(2, 3, 0.4, waited_s=0.5), verify(3, 4)])
    assert round_.not_model_s == pytest.approx(0.6)


def test_growth_that_comes_after_the_verdict_is_waited_for_and_shared_time_counts_once():
    """The verification computes from 2.05 to 2.45, growth from 2.05 to 2.75; the round takes 0.85."""
    calls = [PREFILL, verify(2, 2.5, 0.4), grew(2, 2.8, 0.7, used=2), verify(2.85, 3)]
    (round_,) = rounds_of(calls)
    assert round_.not_model_s == pytest.approx(0.85 - 0.7)


def test_a_sequential_round_is_two_calls():
    (round_,) = rounds_of([PREFILL, verify(2, 2.5, 0.4), block(2.5, 3.0, 0.3), verify(3, 4)])
    assert not round_.is_hit
    assert not round_.was_asked
    assert round_.not_model_s == pytest.approx(0.3)


def test_a_table_that_nobody_waited_for_takes_no_time_of_the_round():
    calls = [PREFILL, verify(2, 2.5, 0.4), grew(2, 2.9, 0.8), verify(2.6, 3), verify(3, 4)]
    assert rounds_of(calls)[0].not_model_s == pytest.approx(0.2)


def test_tables_belong_to_the_verification_that_they_were_sent_with():
    """A moment before or after it; a block that was drafted in time belongs to the verdict before it."""
    early, late = grew(1.999, 2.4, used=1), grew(3.001, 3.4, used=2)
    first, second = rounds_of([PREFILL, early, verify(2, 2.5), verify(3, 3.5), late, verify(4, 5)])
    assert first.drafts == (early,)
    assert second.drafts == (late,)
    just_in_time = block(2.999, 3.0)
    first, second = rounds_of([PREFILL, verify(2, 2.5), just_in_time, verify(3, 3.5), verify(4, 5)])
    assert first.drafts == (just_in_time,)
    assert second.drafts == ()


def test_a_pass_that_was_waited_for_is_no_hit():
    calls = [PREFILL, verify(2, 3), grew(2.5, 3.5, used=1), verify(3.6, 4)]
    (round_,) = rounds_of(calls)
    assert round_.picked is not None
    assert not round_.is_hit
    assert round_.waited_s == pytest.approx(0.6)
    assert waiting_share([round_]) == pytest.approx(0.6 / 1.6)
    assert waiting_share([]) == 0.0


def test_the_share_hidden_is_of_the_tables_that_were_picked():
    calls = [
        *(PREFILL, verify(2, 3), grew(2, 2.5, used=1)),  # hidden whole
        *(verify(3, 4), grew(3, 4.5, used=1)),  # two thirds of 1.5
        *(verify(5, 6), grew(5, 9)),  # a miss: does not count
        *(verify(10, 11), verify(12, 13)),
    ]
    assert hidden_share(rounds_of(calls)) == pytest.approx((0.5 + 1.0) / 2.0)
    assert hidden_share([]) == 0.0


def test_a_pass_that_began_behind_the_verification_before_was_hidden_then_too():
    """From 2.9 on: all but the 0.1 between the two verifications."""
    calls = [PREFILL, verify(2, 3), verify(3.1, 4), grew(2.9, 3.4, used=1), verify(4.1, 5)]
    *_, round_ = rounds_of(calls)
    assert round_.is_hit
    assert hidden_share([round_]) == pytest.approx(0.4 / 0.5)


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 6), min_size=1, max_size=8))
def test_no_share_leaves_its_bounds(steps):
    calls, now_s = [PREFILL], 1.0
    for wire_s, waited_s, computed_s, pause_s, offset_s, draft_s in steps:
        end_s = now_s + wire_s + waited_s + computed_s
        calls.append(verify(now_s, end_s, computed_s, waited_s=waited_s))
        calls.append(grew(now_s + offset_s / 100, now_s + offset_s + draft_s, draft_s * offset_s, used=1))
        now_s = end_s + pause_s
    rounds = rounds_of([*calls, verify(now_s, now_s + 1)])
    assert 0 <= hidden_share(rounds) <= 1 + 1e-9
    for round_ in rounds:
        assert -1e-9 <= round_.not_model_s <= round_.end_s - round_.verify.sent_s + 1e-9
