"""Looking guesses up in the text: the longest and latest earlier place wins, and the index grows with the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lookup import NGRAM_TOKENS, Lookup


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
