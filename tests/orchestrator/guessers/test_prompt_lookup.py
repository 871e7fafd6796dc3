"""Looking guesses up in the text: the longest and latest earlier place wins, and the index grows with the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.calibration import PRIOR, Average
from core.speculation.guesser import Guesses
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT, TokenTree
from orchestrator.guessers.prompt_lookup import NGRAM_TOKENS, Lookup, LookupGuesser


def by_hand(tokens, num_tokens):
    for length in NGRAM_TOKENS:
        ending = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == ending:
                return tuple(tokens[end : end + num_tokens])
    return ()


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 6), st.lists(st.integers(1, 5), max_size=40))
def test_it_finds_what_a_search_by_hand_finds_however_the_text_grew(tokens, num_tokens, pieces):
    lookup, end = Lookup(), 0
    for piece in pieces:
        end = min(len(tokens), end + piece)
        assert lookup.guess(tokens[:end], num_tokens) == by_hand(tokens[:end], num_tokens)
    assert lookup.guess(tokens, num_tokens) == by_hand(tokens, num_tokens)


def test_a_text_without_repetition_gives_no_guess():
    assert Lookup().guess(list(range(50)), 4) == ()
    assert Lookup().guess([], 4) == ()


def test_a_longer_ending_in_common_is_believed_before_a_later_shorter_one():
    assert Lookup().guess([1, 2, 3, 9, 5, 2, 3, 7, 1, 2, 3], 1) == (9,)


# As a guesser


def test_what_followed_the_ending_before_is_a_chain_below_the_root():
    worth = Average(PRIOR)
    guesser = LookupGuesser(worth, max_depth=3)
    tree = SpeculationTree()
    tree.guess(Guesses.chain([9], [0.8]))
    found = guesser.propose([1, 2, 3, 4, 1, 2])
    assert (found.parents, found.tokens) == ((ROOT, 0, 1), (3, 4, 1))
    assert found.chances == (PRIOR,) * 3
    tree.guess(found)
    assert tree.block(tree.best(9, 9)) == TokenTree((9, 3, 4, 1), (ROOT, ROOT, 1, 2))
    assert len(guesser.propose([1, 2, 3])) == 0


@pytest.mark.parametrize(
    ("committed", "seen"),
    [
        ([3, 4, 1, 7], [True, True, True]),
        ([3, 4], [True, True]),  # of the third nothing is known yet
        ([3, 9, 1], [True, False]),
        ([9], [False]),
    ],
)
def test_it_is_credited_with_what_the_text_did(committed, seen):
    worth, expected = Average(PRIOR), Average(PRIOR)
    for is_right in seen:
        expected.see(is_right)
    guesser = LookupGuesser(worth, max_depth=3)
    guesser.propose([1, 2, 3, 4, 1, 2])
    guesser.saw(committed)
    guesser.saw([1])
    assert worth == expected
