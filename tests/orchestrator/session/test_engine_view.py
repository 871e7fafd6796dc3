"""The view of an engine: what a message brings, what an answer changes, how often it may be Missing."""

from __future__ import annotations

import pytest

from core.records import Sampling, SequenceSpec, Stamp
from core.text.token_log import TokenLog
from orchestrator.session.engine_view import MAX_RESENDS, EngineView, SessionText

SPEC = SequenceSpec(3, Sampling())


@pytest.fixture
def log():
    return TokenLog((3, 1, 4))


@pytest.fixture
def held(log):
    held = EngineView(SessionText("s", log, SPEC))
    held.begin_lease("lease", 7)
    return held


def test_a_first_message_brings_everything_and_how_to_sample(held, log):
    assert held.next_header() == (Stamp("lease", 7, 1), log.base(0), SPEC)
    assert held.num_behind == 3


def test_a_later_message_brings_what_follows_the_last_token_but_one(held, log):
    """The last token that an engine holds is sent again: somebody asks what follows it."""
    held.next_header()
    held.take(3)
    assert held.next_header() == (Stamp("lease", 7, 2), log.base(2), None)
    held.take(3)
    log.extend((1, 5))
    assert held.num_behind == 3
    assert held.next_header() == (Stamp("lease", 7, 3), log.base(2), None)


def test_who_holds_less_than_it_was_sent_is_sent_the_rest(held, log):
    held.next_header()
    held.take(1)
    assert held.next_header() == (Stamp("lease", 7, 2), log.base(1), None)


def test_only_the_reply_that_is_awaited_is_one(held):
    stamp = held.next_header()[0]
    assert held.answers(stamp)
    for other in (Stamp("lease", 7, 0), Stamp("lease", 7, 2), Stamp("lease", 8, 1), Stamp("another", 7, 1)):
        assert not held.answers(other)
    held.take(3)
    assert not held.answers(stamp), "nor is it one twice"


def test_another_engine_holds_nothing_and_owes_nothing(held, log):
    stamp = held.next_header()[0]
    held.take(3)
    held.next_header()
    held.begin_lease("another", 8)
    assert not held.answers(stamp)
    assert held.awaiting is None
    assert held.next_header() == (Stamp("another", 8, 3), log.base(0), SPEC)


def test_what_is_missing_is_sent_a_few_times_and_then_no_more(held):
    for _ in range(MAX_RESENDS):
        held.next_header()
        assert held.must_resend(0)
    held.next_header()
    assert not held.must_resend(0)


@pytest.mark.parametrize("forgive", [lambda held: held.take(3), lambda held: held.begin_lease("another", 8)])
def test_an_answer_or_another_engine_starts_the_count_again(held, forgive):
    for _ in range(5):
        for _ in range(MAX_RESENDS):
            held.next_header()
            assert held.must_resend(0)
        held.next_header()
        forgive(held)


@pytest.mark.parametrize(
    ("num_tokens", "is_possible", "base"), [(-1, False, 0), (0, True, 0), (2, True, 2), (3, True, 2), (4, False, 2)]
)
def test_what_is_sent_again_begins_where_the_engine_says_that_it_ends(held, log, num_tokens, is_possible, base):
    held.next_header()
    assert held.must_resend(num_tokens) == is_possible
    assert held.awaiting is None
    _, sent, spec = held.next_header()
    assert sent == log.base(base)
    assert (spec is None) == (base > 0)
