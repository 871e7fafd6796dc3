"""Recent outputs of a caller guess its next ones, nobody else's, and change no token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import RequestCancelled, Unavailable
from core.records import VerifyRequest
from orchestrator.guessers import Guessers, Histories
from orchestrator.session import messages as m
from tests.orchestrator.fakes import FakeTokenizer, plain, request
from tests.orchestrator.world import FaultyWorld, World, unlimited

PROMPT, NUM_TOKENS = (46, 49, 48), 10
"""Prompt and output have no two tokens twice, so that nothing can be looked up in them."""
SUFFIX = {"with_draft": False, "guessers": ("suffix",)}


@pytest.fixture
def shared():
    return Guessers(histories=Histories(10_000, 8))


def world(shared, isolation="caller:a", **changes):
    job = request(PROMPT, NUM_TOKENS, isolation=isolation, **changes)
    return World(job, FakeTokenizer(), shared=shared, **SUFFIX)


def num_passes(served):
    return sum(isinstance(command, VerifyRequest) for command in served.sent)


def guessed(served):
    return [token for each in served.sent if isinstance(each, VerifyRequest) for token in each.block.tokens]


def test_a_second_request_of_the_same_caller_takes_fewer_passes(shared):
    first, second = world(shared).start().run(), world(shared).start().run()
    assert first.tokens == second.tokens == plain(PROMPT, NUM_TOKENS)
    assert not guessed(first)
    assert (num_passes(first), num_passes(second)) == (NUM_TOKENS, 3), "one token, five and four"
    (stats,) = second.chunks[-1].stats.sources
    assert (stats.name, stats.num_accepted_tokens, stats.num_failures) == ("suffix", NUM_TOKENS - 3, 0)


@pytest.mark.parametrize(
    ("first", "second"), [("caller:a", "caller:b"), ("tenant:a", "caller:a"), ("caller:a", ""), ("", "")]
)
def test_another_callers_request_is_not_guessed_by_it(shared, first, second):
    world(shared, first).start().run()
    other = world(shared, second).start().run()
    assert not guessed(other)
    assert num_passes(other) == NUM_TOKENS
    assert other.tokens == plain(PROMPT, NUM_TOKENS)


def test_what_a_client_broke_off_is_kept_as_far_as_it_got(shared):
    """All of it was verified, and the caller has it."""
    broken = world(shared).start()
    for _ in range(6):
        broken.deliver()
    num_kept = len(broken.tokens)
    broken.handle(m.Abandoned(RequestCancelled("gone")))
    again = world(shared).start().run()
    assert 0 < len(guessed(again)) <= num_kept + 4
    assert again.tokens == plain(PROMPT, NUM_TOKENS)


def test_what_ended_by_a_failure_of_engines_is_kept(shared):
    failed = world(shared).start()
    for _ in range(6):
        failed.deliver()
    while failed.error is None:
        failed.handle(m.TargetLost(1, "dead"))
        failed.waiting.clear()
        failed.handle(m.TargetLeased("s", 1))
    assert isinstance(failed.error, Unavailable)
    assert guessed(world(shared).start().run())


def test_what_a_defect_ended_is_not_kept(shared):
    """Nobody knows what state it was in."""
    broken = world(shared).start()
    for _ in range(6):
        broken.deliver()
    broken.session.break_off()
    assert not guessed(world(shared).start().run())


def test_an_output_is_resumed_with_guesses_by_its_own_first_part(shared):
    world(shared).start().run()
    whole = plain(PROMPT, NUM_TOKENS)
    resumed = world(shared, resume_tokens=tuple(whole[:3])).start().run()
    assert resumed.tokens == whole[3:]
    assert num_passes(resumed) < NUM_TOKENS - 3


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    outputs=st.lists(st.lists(st.integers(1, 49), min_size=1, max_size=30), max_size=4),
    guessers=st.sampled_from([("suffix",), ("draft", "suffix")]),
)
def test_no_history_and_no_order_of_faults_changes_a_token(seed, outputs, guessers):
    histories = Histories(1000, 8)
    right = plain(PROMPT, 24)
    for index, output in enumerate(outputs):
        histories.of("caller:a").add([*right[index : index + 9], *output], 0)
    job = request(PROMPT, 24, isolation="caller:a")
    shared = Guessers(histories=histories)
    served = FaultyWorld(seed, job, FakeTokenizer(), limits=unlimited(), guessers=guessers, shared=shared).start().run()
    assert (served.error, served.tokens) == (None, right)
