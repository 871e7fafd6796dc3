"""Looking guesses up in the text: the longest and latest earlier place wins, and the index grows with the text."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.guesser import NO_GUESSES, Guesses
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT, TokenTree
from orchestrator.guessers import prompt_lookup
from orchestrator.guessers.prompt_lookup import PromptLookup

new_lookup = partial(PromptLookup, min_match=2, max_match=4)


def by_hand(tokens, max_depth, lengths=(4, 3, 2)):
    for length in lengths:
        ending = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == ending:
                return tuple(tokens[end : end + max_depth])
    return ()


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 6),
    st.lists(st.integers(1, 5), max_size=40),
    st.sampled_from([(2, 4), (1, 1), (3, 6)]),
)
def test_it_finds_what_a_search_by_hand_finds_however_the_text_grew(tokens, max_depth, pieces, matches):
    lookup, end = PromptLookup(max_depth, min_match=matches[0], max_match=matches[1]), 0
    lengths = range(matches[1], matches[0] - 1, -1)
    for piece in (*pieces, len(tokens)):
        end = min(len(tokens), end + piece)
        assert lookup.propose(tokens[:end]).tokens == by_hand(tokens[:end], max_depth, lengths)


def test_a_text_without_repetition_gives_no_guess():
    assert new_lookup(4).propose(list(range(50))) == NO_GUESSES
    assert new_lookup(4).propose([]) == NO_GUESSES


def test_a_longer_ending_in_common_is_believed_before_a_later_shorter_one():
    assert new_lookup(1).propose([1, 2, 3, 9, 5, 2, 3, 7, 1, 2, 3]).tokens == (9,)


def test_guesses_are_a_chain_of_what_followed():
    assert new_lookup(3).propose([1, 2, 3, 4, 1, 2]) == Guesses((ROOT, 0, 1), (3, 4, 1), (1.0, 1.0, 1.0))


FORKED = [1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2, 9, 1, 2]
"""After 1, 2 came 7, 8, 7 and 9."""


@pytest.mark.parametrize(
    ("settings", "firsts"),
    [
        ({}, (9,)),
        ({"by_frequency": True}, (7,)),
        ({"num_branches": 3}, (9, 7, 8)),
        ({"by_frequency": True, "num_branches": 2}, (7, 9)),
        ({"num_branches": 4}, (9, 7, 8)),
    ],
)
def test_continuations_that_differ_are_branches_the_latest_or_the_most_frequent_first(settings, firsts):
    found = PromptLookup(2, min_match=2, max_match=2, **settings).propose(FORKED)
    at_root = [node for node, parent in enumerate(found.parents) if parent == ROOT]
    assert tuple(found.tokens[node] for node in at_root) == firsts
    shares = {7: 0.5, 8: 0.25, 9: 0.25}
    assert [found.chances[node] for node in at_root] == [shares[token] for token in firsts]
    assert [found.tokens[node + 1] for node in at_root] == [1] * len(firsts), "each goes on from its latest place"
    found.check(vocab_size=10)


def test_branches_make_a_tree_with_what_others_have_guessed():
    tree = SpeculationTree()
    tree.add_guesses(Guesses.chain([8], [0.8]))
    tree.add_guesses(new_lookup(2, num_branches=2).propose([1, 2, 7, 1, 2, 8, 1, 2]))
    assert tree.block(tree.best(9, 9)) == TokenTree((8, 1, 7, 1), (ROOT, 0, ROOT, 2))


def test_the_index_is_bounded_and_goes_on_from_the_end_of_the_text(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "MAX_INDEXED_TOKENS", 64)
    monkeypatch.setattr(prompt_lookup, "MAX_LOOK_BACK_TOKENS", 16)
    lookup, text = new_lookup(2), []
    for token in range(1000):
        text += [token % 7, token % 11]
        lookup.propose(text)
        assert len(lookup._ends) <= 3 * 64
        assert all(len(ends) <= prompt_lookup.MAX_OCCURRENCES for ends in lookup._ends.values())
    text += [50, 51, 52, 50, 51]
    assert lookup.propose(text).tokens == (52, 50)


def test_only_the_end_of_a_long_prompt_is_looked_through(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "MAX_INDEXED_TOKENS", 64)
    monkeypatch.setattr(prompt_lookup, "MAX_LOOK_BACK_TOKENS", 16)
    text = [90, 91, 92, *range(80), 90, 91]
    assert new_lookup(2).propose(text) == NO_GUESSES
