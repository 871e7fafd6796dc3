"""Where an output ends, and that everything about it is cut there."""

from __future__ import annotations

import pytest

from core.records import FinishReason, TokenLogprobs
from orchestrator.session.output import Output
from orchestrator.text.detokenize import IncrementalDetokenizer
from tests.orchestrator.fakes import EOS, FakeTokenizer, request

A, B, C, D = 1, 2, 3, 4
"""Tokens whose text is a, b, c and d."""


def output(max_tokens=10, **changes):
    job = request(max_tokens=max_tokens, **changes)
    return Output(job, frozenset({EOS}), IncrementalDetokenizer(FakeTokenizer(), job.stop, job.include_stop))


def commit(output, *tokens):
    """The last of them is the target's own."""
    logprobs = tuple(TokenLogprobs(-float(token)) for token in tokens)
    return output.commit(tokens, logprobs)


def seen(chunk):
    """Counts that must agree on one end."""
    assert len(chunk.token_ids) == len(chunk.is_guess) == len(chunk.logprobs)
    return chunk.text, chunk.token_ids, chunk.finish_reason, chunk.matched_stop


def test_pieces_follow_each_other_until_there_are_as_many_tokens_as_asked_for():
    growing = output(max_tokens=5)
    assert growing.num_remaining == 5
    first = commit(growing, A, B)
    assert seen(first) == ("ab", (A, B), None, None)
    assert first.is_guess == (True, False)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 2)
    assert growing.num_remaining == 3
    last = commit(growing, C, D, A, B)
    assert seen(last) == ("cda", (C, D, A), FinishReason.LENGTH, None)
    assert last.usage.completion_tokens == 5
    assert growing.is_finished


@pytest.mark.parametrize(
    ("changes", "tokens", "text", "matched"),
    [
        ({}, (A, EOS), "a", None),
        ({"stop_token_ids": frozenset({C})}, (A, B, C), "ab", C),
        ({"stop_token_ids": frozenset({C}), "include_stop": True}, (A, B, C), "abc", C),
        ({"stop_token_ids": frozenset({EOS})}, (A, EOS), "a", EOS),
        ({"stop_token_ids": frozenset({EOS}), "ignore_eos": True}, (A, EOS), "a", EOS),
        ({"stop": ("bc",)}, (A, B, C), "a", "bc"),
        ({"stop": ("bc",), "include_stop": True}, (A, B, C), "abc", "bc"),
        ({"stop": ("c",), "stop_token_ids": frozenset({C}), "include_stop": True}, (A, B, C), "abc", "c"),
        ({"stop": ("c",), "stop_token_ids": frozenset({B})}, (A, B), "a", B),
        ({"stop": ("ab",), "stop_token_ids": frozenset({C})}, (A, B), "", "ab"),
    ],
)
def test_whatever_ends_an_output_first_cuts_all_of_it(changes, tokens, text, matched):
    """The rest of the same verdict is dropped."""
    growing = output(**changes)
    chunk = commit(growing, *tokens, D, D)
    assert seen(chunk) == (text, tokens, FinishReason.STOP, matched)
    assert chunk.usage.completion_tokens == growing.num_tokens == len(tokens)


def test_the_same_in_pieces_of_one_token():
    growing = output(stop=("bcd",))
    assert [seen(commit(growing, token)) for token in (A, B, C, D)] == [
        ("a", (A,), None, None),
        ("", (B,), None, None),
        ("", (C,), None, None),
        ("", (D,), FinishReason.STOP, "bcd"),
    ]


def test_end_of_sequence_may_be_ignored():
    growing = output(ignore_eos=True)
    assert seen(commit(growing, A, EOS, B)) == ("ab", (A, EOS, B), None, None)


def test_a_stop_token_that_is_also_the_last_one_allowed_stops():
    growing = output(max_tokens=2, stop_token_ids=frozenset({B}))
    assert seen(commit(growing, A, B)) == ("a", (A, B), FinishReason.STOP, B)


def test_what_was_held_back_for_a_stop_string_is_shown_at_the_end():
    growing = output(max_tokens=3, stop=("bcd",))
    assert commit(growing, A, B).text == "a"
    assert seen(commit(growing, C)) == ("bc", (C,), FinishReason.LENGTH, None)


def test_a_stop_string_that_the_last_token_completes_stops():
    growing = output(max_tokens=3, stop=("bc",))
    assert seen(commit(growing, A, B, C)) == ("a", (A, B, C), FinishReason.STOP, "bc")


def test_what_is_resumed_is_counted_and_not_shown_again():
    growing = output(max_tokens=5, stop=("bcd",))
    assert growing.resume((A, B)) is None
    assert growing.num_remaining == 3
    chunk = commit(growing, C, A)
    assert seen(chunk) == ("bca", (C, A), None, None), "b was held back, and comes now"
    assert chunk.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("changes", "resumed", "reason", "num_tokens", "matched"),
    [
        ({"max_tokens": 2}, (A, B), FinishReason.LENGTH, 2, None),
        ({}, (A, EOS), FinishReason.STOP, 2, None),
        ({"stop": ("ab",)}, (A, B, C), FinishReason.STOP, 2, "ab"),
    ],
)
def test_what_is_complete_when_it_is_resumed_ends_at_once(changes, resumed, reason, num_tokens, matched):
    chunk = output(**changes).resume(resumed)
    assert (chunk.text, chunk.token_ids, chunk.is_guess, chunk.logprobs) == ("", (), (), ())
    assert (chunk.finish_reason, chunk.matched_stop) == (reason, matched)
    assert chunk.usage.completion_tokens == num_tokens
