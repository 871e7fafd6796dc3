"""Controls: what they propose, and the laws that they say, of corpora that can be counted by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from core.speculation.token_tree import NO_Q
from orchestrator.guessers.corpus import index as corpus_index
from orchestrator.guessers.corpus.index import CorpusIndex, encode_index
from orchestrator.guessers.corpus.table import CorpusTable
from orchestrator.guessers.random_tokens import RandomTokens

VOCAB_SIZE = 50
CORPUS = ([1, 2, 1, 2, 1, 3], [1, 2], [4, 1])
"""Token 1 comes five times, 2 three times; after 1 there is 2 three times, and 3 once."""


def index_of(*documents):
    return CorpusIndex(*encode_index(documents, vocab_size=VOCAB_SIZE, vocabulary="v"))


def table(order, *documents, depth=3, most=1024):
    return CorpusTable(index_of(*(documents or CORPUS)), order, depth, most)


def shares(law):
    return dict(zip(law.token_ids, law.probs, strict=True))


def test_a_bigram_table_proposes_what_comes_most_often_after_the_last_token():
    found = table(2).propose([9, 9, 4])
    assert found.tokens == (1, 2, 1)
    assert found.chances == pytest.approx((1.0, 0.75, 1.0))
    assert table(2).propose([9]).tokens == ()
    assert table(2).propose([3]).tokens == (), "it ends its document"


def test_a_unigram_table_proposes_the_most_frequent_token_whatever_the_text():
    for text in ([9], [1, 2, 3]):
        found = table(1).propose(text)
        assert found.tokens == (1, 1, 1)
        assert found.chances == pytest.approx((0.5,) * 3)


def test_laws_are_the_counts_of_the_corpus_without_the_ends_of_its_documents():
    assert shares(table(1).distribution([9], ())) == pytest.approx({1: 0.5, 2: 0.3, 3: 0.1, 4: 0.1})
    assert shares(table(2).distribution([9, 1], ())) == pytest.approx({2: 0.75, 3: 0.25})
    assert shares(table(2).distribution([9, 9], (1, 2))) == pytest.approx({1: 1.0})
    assert table(2).distribution([3], ()) == NO_Q
    assert table(2).distribution([VOCAB_SIZE], ()) == NO_Q


def test_of_a_law_the_likeliest_tokens_alone_are_told_where_a_q_may_not_have_more():
    assert shares(table(1, most=2).distribution([9], ())) == pytest.approx({1: 0.625, 2: 0.375})


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(0, 3))
def test_laws_are_counted_as_by_hand(documents, last):
    index = index_of(*documents)
    unigrams = Counter(token for document in documents for token in document)
    bigrams = Counter(after for document in documents for before, after in pairwise(document) if before == last)
    for order, counts in ((1, unigrams), (2, bigrams)):
        expected = {token: count / counts.total() for token, count in counts.items()}
        assert shares(CorpusTable(index, order, 2, 99).distribution([last], ())) == pytest.approx(expected, rel=1e-6)


def test_of_many_places_some_are_counted_in_proportion(monkeypatch):
    monkeypatch.setattr(corpus_index, "MAX_COUNTED", 8)
    law = table(2, *[[1, 2]] * 75, *[[1, 3]] * 25).distribution([1], ())
    assert shares(law) == pytest.approx({2: 0.75, 3: 0.25})


def test_each_law_is_counted_once_for_all_sessions_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(corpus_index, "MAX_DISTRIBUTIONS", 2)
    index = index_of(*CORPUS)
    first, second = (CorpusTable(index, 2, 3, 99) for _ in range(2))
    assert first.distribution([1], ()) is second.distribution([9, 1], ())
    for token in (1, 2, 3, 4):
        first.distribution([token], ())
    assert index.distribution_after.cache_info().currsize == 2


def test_random_tokens_are_any_of_the_vocabulary_evenly_and_the_same_again():
    guesser = RandomTokens(8, max_depth=4)
    texts = [[0] * length for length in range(1, 1001)]
    found = [guesser.propose(text) for text in texts]
    assert [RandomTokens(8, 4).propose(text) for text in texts] == found
    counts = Counter(token for guesses in found for token in guesses.tokens)
    assert set(counts) == set(range(8))
    assert stats.chisquare([*counts.values()]).pvalue > 1e-6
    assert found[0].chances == (0.125,) * 4
