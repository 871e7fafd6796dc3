"""n-gram tables: the most frequent continuation of the longest known context, of a window that moves with the text."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.guesser import NO_GUESSES
from core.speculation.token_tree import NO_Q, SparseDistribution
from orchestrator.guessers import ngram
from orchestrator.guessers.ngram import NgramTables


def counts_of(window):
    """Counts of the tokens that followed each context in the window."""
    found = {}
    for place in range(len(window)):
        for length in (3, 2, 1):
            if place >= length:
                found.setdefault(tuple(window[place - length : place]), Counter())[window[place]] += 1
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=30))
def test_the_tables_count_what_is_in_the_window_however_the_text_grew(tokens, pieces):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "WINDOW_TOKENS", 12)
        tables, end = NgramTables(3), 0
        for piece in (*pieces, len(tokens)):
            end = min(len(tokens), end + piece)
            found = tables.propose(tokens[:end])
            expected = counts_of(tokens[max(0, end - 12) : end])
            assert tables._tables == expected
            text = list(tokens[:end])
            for token, chance in zip(found.tokens, found.chances, strict=True):
                counts = next(expected[tuple(text[-n:])] for n in (3, 2, 1) if tuple(text[-n:]) in expected)
                assert counts[token] == max(counts.values())
                assert chance == counts[token] / counts.total()
                text.append(token)


def test_a_longer_context_is_believed_before_a_shorter_one():
    text = [1, 2, 3, 9, 7, 3, 8, 7, 3, 8, 1, 2, 3]
    found = NgramTables(1).propose(text)
    assert (found.tokens, found.chances) == ((9,), (1.0,))


def test_of_equally_frequent_ones_the_latest_comes_first():
    assert NgramTables(1).propose([5, 1, 5, 2, 5]).tokens == (2,)
    assert NgramTables(1).propose([5, 2, 5, 1, 5]).tokens == (1,)


def test_guesses_go_on_from_guesses_until_nothing_is_known():
    found = NgramTables(9).propose([1, 2, 3, 4, 1])
    assert found.tokens == (2, 3, 4, 1, 2, 3, 4, 1, 2)
    assert NgramTables(9).propose([1, 2, 3]) == NO_GUESSES


def test_memory_is_that_of_the_window():
    tables, text = NgramTables(4), []
    for token in range(3000):
        text += [token, token * 7 % 501]
        tables.propose(text)
        assert len(tables._tables) <= 3 * ngram.WINDOW_TOKENS
    assert sum(sum(counts.values()) for counts in tables._tables.values()) <= 3 * ngram.WINDOW_TOKENS


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=4))
def test_its_law_is_the_counts_of_the_longest_known_context_behind_what_was_drawn(text, drawn):
    tables, counts = NgramTables(3), counts_of(text)
    law = tables.distribution(text, drawn)
    assert tables._tables == counts, "what was drawn is none of the text"
    behind = (*text, *drawn)
    known = next((counts[behind[-n:]] for n in (3, 2, 1) if behind[-n:] in counts and n <= len(behind)), None)
    if known is None:
        assert law == NO_Q
    else:
        assert dict(zip(law.token_ids, law.probs, strict=True)) == pytest.approx(
            {token: count / known.total() for token, count in known.items()}, rel=1e-6
        )


def test_its_law_has_the_most_frequent_tokens_alone_where_a_q_may_not_have_more():
    text = [5, 1, 5, 2, 5, 2, 5, 3, 5]
    assert NgramTables(1, max_distribution_tokens=1).distribution(text, ()) == SparseDistribution((2,), (1.0,))
    assert NgramTables(1).distribution(text, ()).probs == (0.5, 0.25, 0.25)
