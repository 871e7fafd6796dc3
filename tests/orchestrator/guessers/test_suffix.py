"""The suffix index: the places with the longest ending in common, their continuations as a tree, in bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.guesser import NO_GUESSES
from core.speculation.token_tree import ROOT
from orchestrator.guessers.continuations import MAX_NODES
from orchestrator.guessers.suffix import suffix_index as suffix
from orchestrator.guessers.suffix.suffix_array import MAX_MATCH, MIN_MATCH
from orchestrator.guessers.suffix.suffix_index import SuffixIndex


def match_of(text, end):
    """Length of the match, counted by hand, up to the longest that is told apart."""
    match = 0
    while match < min(end, MAX_MATCH) and text[end - 1 - match] == text[len(text) - 1 - match]:
        match += 1
    return match


def matches_by_hand(text):
    found = sorted((match_of(text, end) for end in range(1, len(text))), reverse=True)
    return [match for match in found if match >= MIN_MATCH][: suffix.MAX_OCCURRENCES]


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(1, 20), max_size=40))
def test_the_places_with_the_longest_endings_in_common_are_found_however_the_text_grew(tokens, pieces):
    index, end = SuffixIndex(4), 0
    for piece in (*pieces, len(tokens)):
        end = min(len(tokens), end + piece)
        text = tokens[:end]
        index._index(text)
        found = list(index._array.nearest(text, text, suffix.MAX_OCCURRENCES))
        assert [min(match, MAX_MATCH) for _, match in found] == matches_by_hand(text)
        assert all(min(match, MAX_MATCH) == match_of(text, place) for place, match in found)


def test_many_tokens_at_once_are_indexed_as_one_by_one():
    text = [random.Random(1).randrange(6) for _ in range(600)]
    at_once, one_by_one = SuffixIndex(4), SuffixIndex(4)
    at_once._index(text)
    for end in range(1, len(text) + 1):
        one_by_one._index(text[:end])
    assert {token: set(ends) for token, ends in at_once._array._ends.items()} == {
        token: set(ends) for token, ends in one_by_one._array._ends.items()
    }
    assert at_once.propose(text) == one_by_one.propose(text)


def test_the_more_places_agree_the_likelier_is_a_continuation():
    text = [1, 2, 3, 7, 9, 1, 2, 3, 8, 9, 1, 2, 3, 7, 5, 1, 2, 3]
    found = SuffixIndex(2).propose(text)
    chances = {
        (None if parent == ROOT else found.tokens[parent], token): chance
        for parent, token, chance in zip(found.parents, found.tokens, found.chances, strict=True)
    }
    assert chances == pytest.approx({(None, 7): 2 / 3, (None, 8): 1 / 3, (7, 9): 0.5, (7, 5): 0.5, (8, 9): 1.0})


def test_places_that_match_far_less_than_the_best_have_no_vote():
    text = [1, 2, 3, 4, 5, 9, 4, 5, 7, 4, 5, 7, 1, 2, 3, 4, 5]
    assert SuffixIndex(1).propose(text).tokens == (9,)


def test_a_text_without_repetition_gives_no_guess():
    assert SuffixIndex(4).propose(list(range(50))) == NO_GUESSES
    assert SuffixIndex(4).propose([]) == NO_GUESSES
    assert SuffixIndex(4).propose([1]) == NO_GUESSES


def test_an_answer_has_no_more_nodes_than_are_bounded():
    text = [*(token for n in range(30) for token in (1, 2, 10 + n, *range(100 + n, 160 + n))), 1, 2]
    found = SuffixIndex(64).propose(text)
    assert len(found) == MAX_NODES
    found.check(vocab_size=1000)


def test_memory_is_bounded_and_what_was_forgotten_is_not_found(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_INDEXED_TOKENS", 64)
    index, text = SuffixIndex(2), [90, 91, 92, 93]
    for token in range(500):
        text.append(token % 50)
        index._index(text)
        assert len(index._array) <= 64 + 8
    text += [90, 91]
    assert index.propose(text) == NO_GUESSES
    text += [7, 8]
    assert index.propose(text).tokens[0] == 9


@pytest.mark.ci
def test_a_million_tokens_leave_it_as_large_as_the_window():
    dice, text = random.Random(7), []
    index = SuffixIndex(8)
    while len(text) < 10**6:
        if len(text) > 100 and dice.random() < 0.5:
            start = dice.randrange(max(0, len(text) - 5000), len(text) - 40)
            text += text[start : start + dice.randrange(1, 40)]
        else:
            text += [dice.randrange(1000) for _ in range(dice.randrange(1, 10))]
        index.propose(text).check(vocab_size=1000)
        num_places = len(index._array)
        assert num_places <= suffix.MAX_INDEXED_TOKENS * 9 // 8
        assert len(index._array._ends) <= num_places
    assert index._end == len(text)
