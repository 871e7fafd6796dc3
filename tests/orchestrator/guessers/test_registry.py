"""The table of guessers: each can be made, and says something sound of any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.speculation.source_worth import SourceWorth
from orchestrator.guessers.corpus_index import CorpusIndex, encode_index
from orchestrator.guessers.registry import GUESSERS, SOURCES, Guessers, Means, available_sources, check_sources

CORPUS = ((1, 2, 3, 4, 5) * 5, (1, 2, 5, 5, 0, 1, 2, 4), (0, 1, 2, 3))
INDEX = CorpusIndex(*encode_index(CORPUS, vocab_size=6, vocabulary=""))
MEANS = Means(SpeculationConfig(lookup_branches=3), 4, INDEX)


@pytest.mark.parametrize("name", GUESSERS)
@given(pieces=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=1, max_size=12))
def test_whatever_the_text_each_answers_soundly_and_no_deeper_than_is_of_use(name, pieces):
    guesser, text = GUESSERS[name](MEANS), []
    for piece in pieces:
        text += piece
        before = list(text)
        found = guesser.propose(text)
        found.check(vocab_size=6)
        assert text == before
        depths = []
        for parent in found.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert max(depths, default=0) <= MEANS.max_depth
    assert name in SOURCES


@pytest.mark.parametrize("name", ["prompt_lookup", "ngram", "suffix", "retrieval"])
def test_what_repeats_is_found(name):
    guesser, text = GUESSERS[name](MEANS), [1, 2, 3, 4, 5] * 6
    assert guesser.propose(text).tokens[:4] == (1, 2, 3, 4)


def test_a_session_gets_those_that_it_names_and_none_where_nothing_can_be_guessed():
    guessers, config = Guessers(MEANS.index), MEANS.config
    assert list(guessers.panel(SOURCES, config, 4, SourceWorth(), 50)._guessers) == list(GUESSERS)
    assert not guessers.panel(("draft",), config, 4, SourceWorth(), 50)._guessers
    assert not guessers.panel(SOURCES, config, 0, SourceWorth(), 50)._guessers


def test_a_name_that_there_is_none_of_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"speculation\.guessers\[1\] must be one of draft, .*, got 'oracle'"):
        check_sources(SpeculationConfig(guessers=("draft", "oracle")))
    with pytest.raises(ConfigError, match=r"needs speculation\.retrieval_index"):
        check_sources(SpeculationConfig(guessers=("retrieval",)))


def test_retrieval_can_be_asked_for_where_there_is_an_index():
    assert available_sources(SpeculationConfig()) == tuple(name for name in SOURCES if name != "retrieval")
    assert available_sources(SpeculationConfig(retrieval_index="corpus.index")) == SOURCES
