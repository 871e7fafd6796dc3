"""Retrieval: the longest ending that a corpus has, how often it goes on how, and files that are no index."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.speculation.guesser import NO_GUESSES
from core.speculation.token_tree import ROOT
from orchestrator.guessers.corpus.index import (
    NUM_PASSES,
    SORTED_TOKENS,
    CorpusIndex,
    encode_index,
    suffix_order,
    write_index,
)
from orchestrator.guessers.corpus.retrieval import MAX_MATCH, MIN_MATCH, Retrieval

VOCAB_SIZE = 50


def index_of(*documents):
    return CorpusIndex(*encode_index(documents, vocab_size=VOCAB_SIZE, vocabulary="v"))


def occurrences(documents, ending):
    """The tokens after `ending`, wherever it occurs."""
    size = len(ending)
    return [
        tuple(document[start + size :])
        for document in documents
        for start in range(len(document) - size + 1)
        if tuple(document[start : start + size]) == tuple(ending)
    ]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=100))
def test_suffixes_are_sorted_by_their_first_tokens(tokens):
    passes = []
    order = suffix_order(np.asarray(tokens, np.int64), lambda: passes.append(1)).tolist()
    assert sorted(order) == list(range(len(tokens)))
    cut = [tokens[start : start + SORTED_TOKENS] for start in order]
    assert cut == sorted(cut)
    assert len(passes) == NUM_PASSES


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=20),
)
def test_the_longest_ending_is_found_with_all_its_places(documents, text):
    index = index_of(*documents)
    match, places = index.find(text[-MAX_MATCH:], MIN_MATCH)
    lengths = [n for n in range(MIN_MATCH, min(len(text), MAX_MATCH) + 1) if occurrences(documents, text[-n:])]
    assert match == max(lengths, default=0)
    if match:
        found = sorted(tuple(index.tokens_after(place, match, 100)) for place in places)
        assert found == sorted(occurrences(documents, text[-match:]))


def test_continuations_are_a_tree_by_how_often_they_come_and_end_with_their_document():
    index = index_of([1, 2, 7, 9], [1, 2, 7, 8], [3, 1, 2, 6], [1, 2])
    found = Retrieval(index, max_depth=4).propose([0, 4, 1, 2])
    chances = {
        (None if parent == ROOT else found.tokens[parent], token): chance
        for parent, token, chance in zip(found.parents, found.tokens, found.chances, strict=True)
    }
    assert chances == pytest.approx({(None, 7): 2 / 3, (None, 6): 1 / 3, (7, 8): 0.5, (7, 9): 0.5})


def test_where_the_longest_ending_ends_its_document_a_shorter_one_counts():
    found = Retrieval(index_of([1, 2, 3], [2, 3, 4]), max_depth=2).propose([1, 2, 3])
    assert found.tokens == (4,)
    assert Retrieval(index_of([1, 2]), max_depth=2).propose([1, 2]) == NO_GUESSES


def test_of_many_places_those_asked_are_as_frequent_as_in_all():
    documents = [[1, 2, 7]] * 75 + [[1, 2, 8]] * 25
    found = Retrieval(index_of(*documents), max_depth=1).propose([1, 2])
    assert dict(zip(found.tokens, found.chances, strict=True)) == {7: 0.75, 8: 0.25}


def test_what_the_corpus_does_not_have_gives_no_guess():
    index = index_of([1, 2, 3])
    for text in ([], [1], [7, 8], [3, 1], [VOCAB_SIZE, VOCAB_SIZE]):
        assert Retrieval(index, 4).propose(text) == NO_GUESSES


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "corpus.index"
    dice = random.Random(3)
    documents = [[dice.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(5)]
    write_index(*encode_index(documents, vocab_size=VOCAB_SIZE, vocabulary="right"), path)
    return path


def test_a_file_that_was_written_is_opened_as_it_was(file):
    assert CorpusIndex.open(file, "right").num_tokens == 5 * 41


def test_an_index_of_another_vocabulary_is_refused(file):
    with pytest.raises(ConfigError, match=r"speculation\.retrieval_index: .* another tokenizer than the target's"):
        CorpusIndex.open(file, "wrong")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-4], "not as long as it says"),
        (lambda data: data + b"more", "not as long as it says"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum is wrong"),
        (lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:], "checksum is wrong"),
        (lambda data: b"PK" + data[2:], "does not begin as one"),
        (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], "is no index"),
        (lambda data: data[:10], "is no index"),
        (lambda _: b"", "is no index"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(file, damage, problem):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=problem):
        CorpusIndex.open(file, "right")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        CorpusIndex.open(tmp_path / "none", "right")


def test_there_must_be_something_to_index():
    with pytest.raises(ValueError, match="0 tokens"):
        encode_index([], vocab_size=5, vocabulary="v")
