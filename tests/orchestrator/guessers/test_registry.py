"""The table of guessers: each can be made, and says something sound of any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.records import Grammar, GrammarKind
from core.speculation.guesser import Guesses
from core.speculation.source_precision import SourcePrecision
from core.speculation.token_tree import ROOT
from orchestrator.guessers.corpus.index import CorpusIndex, encode_index
from orchestrator.guessers.registry import (
    BY_TEXT,
    CONTROLS,
    GUESSERS,
    NEED_INDEX,
    SOURCES,
    GuesserInputs,
    Guessers,
    OutputForm,
    available_sources,
    check_sources,
)

CORPUS = ((1, 2, 3, 4, 5) * 5, (1, 2, 5, 5, 0, 1, 2, 4), (0, 1, 2, 3))
INDEX = CorpusIndex(*encode_index(CORPUS, vocab_size=6, vocabulary=""))


class Forced:
    """A grammar that forces the tokens of a circle."""

    def after(self, output, max_depth):
        return Guesses.chain([(len(output) + place) % 6 for place in range(max_depth)], (1.0,) * max_depth)


class Grammars:
    def __init__(self):
        self.asked = []

    def forced(self, grammar, *, is_binding=True):
        self.asked.append((grammar, is_binding))
        return Forced()


FORCED = {"grammar": Forced(), "template": Forced()}
INPUTS = GuesserInputs(SpeculationConfig(lookup_branches=3), 4, INDEX, forced=FORCED, vocab_size=6)
WORD = Grammar(GrammarKind.REGEX, "[ab]")
LETTER = Grammar(GrammarKind.REGEX, "Dear [a-z]+,")


@pytest.mark.parametrize("name", GUESSERS)
@given(pieces=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=1, max_size=12))
def test_whatever_the_text_each_answers_soundly_and_no_deeper_than_is_of_use(name, pieces):
    guesser, text = GUESSERS[name](INPUTS), []
    for piece in pieces:
        text += piece
        before = list(text)
        found = guesser.propose(text)
        found.check(vocab_size=6)
        assert text == before
        depths = []
        for parent in found.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert max(depths, default=0) <= INPUTS.max_depth
    assert name in SOURCES


@pytest.mark.parametrize("name", ["prompt_lookup", "ngram", "suffix", "retrieval"])
def test_what_repeats_is_found(name):
    guesser, text = GUESSERS[name](INPUTS), [1, 2, 3, 4, 5] * 6
    assert guesser.propose(text).tokens[:4] == (1, 2, 3, 4)


def test_a_session_gets_those_that_it_names_and_none_where_nothing_can_be_guessed():
    guessers, config = Guessers(INPUTS.index), INPUTS.config
    assert list(guessers.panel(SOURCES, config, 4, SourcePrecision(), 50)._guessers) == list(BY_TEXT)
    assert not guessers.panel(("draft",), config, 4, SourcePrecision(), 50)._guessers
    assert not guessers.panel(SOURCES, config, 0, SourcePrecision(), 50)._guessers


def test_a_grammar_guesses_where_the_output_has_one_and_is_compiled_only_if_it_is_asked_for():
    grammars, config = Grammars(), INPUTS.config
    guessers = Guessers(INPUTS.index, grammars)
    held = OutputForm(2, WORD)
    names = [name for name in GUESSERS if name not in ("template", "head")]
    assert list(guessers.panel(SOURCES, config, 4, SourcePrecision(), 50, held)._guessers) == names
    assert grammars.asked == [(WORD, True)]
    for sources, depth, output in ((BY_TEXT, 4, held), (SOURCES, 0, held), (SOURCES, 4, OutputForm(2))):
        assert "grammar" not in guessers.panel(sources, config, depth, SourcePrecision(), 50, output)._guessers
    assert "grammar" not in Guessers(INPUTS.index).panel(SOURCES, config, 4, SourcePrecision(), 50, held)._guessers
    assert grammars.asked == [(WORD, True)]


def test_a_template_brings_its_source_whomever_a_request_names_and_binds_nobody():
    grammars, config = Grammars(), INPUTS.config
    guessers = Guessers(None, grammars)

    def names(sources, output, depth=4, of=guessers):
        return list(of.panel(sources, config, depth, SourcePrecision(), 50, output)._guessers)

    usual = OutputForm(2, template=LETTER)
    assert names(("draft", "suffix"), usual) == ["suffix", "template"]
    assert names(("template", "suffix"), usual) == ["template", "suffix"], "named once, in its own place"
    assert grammars.asked == [(LETTER, False)] * 2
    assert names(("grammar",), OutputForm(2, WORD, LETTER)) == ["grammar", "template"]
    assert sorted(grammars.asked[2:], key=str) == sorted([(WORD, True), (LETTER, False)], key=str)
    assert names(("template",), OutputForm(2)) == names(("template",), usual, depth=0) == []
    assert names(("template",), usual, of=Guessers()) == [], "no grammars are served"


def test_a_template_is_asked_of_the_output_alone_and_claims_less_than_certainty():
    panel = Guessers(None, Grammars()).panel(
        [], INPUTS.config, 4, SourcePrecision(), 50, OutputForm(3, template=LETTER)
    )
    panel.ask([9, 9, 9, 0, 1])
    ((source, guesses),) = panel._proposed
    assert (source, guesses.tokens, guesses.chances) == ("template", (2, 3, 4, 5), (0.9,) * 4)


def test_a_grammar_is_asked_of_the_output_alone():
    panel = Guessers(None, Grammars()).panel(["grammar"], INPUTS.config, 4, SourcePrecision(), 50, OutputForm(3, WORD))
    ((source, guesses),) = panel.ask([9, 9, 9, 0, 1])
    assert (source, guesses.tokens) == ("grammar", (2, 3, 4, 5))


def test_a_grammar_that_cannot_be_followed_costs_its_session_the_source_and_is_counted():
    class Bad(Grammars):
        def forced(self, grammar, *, is_binding=True):
            return Unfollowed()

    class Unfollowed:
        def after(self, output, max_depth):
            raise ValueError("it does not compile")

    panel = Guessers(INPUTS.index, Bad()).panel(SOURCES, INPUTS.config, 4, SourcePrecision(), 6, OutputForm(0, WORD))
    text = [1, 2, 3, 4, 5] * 6
    assert "prompt_lookup" in dict(panel.ask(text))
    assert "grammar" not in dict(panel.ask([*text, 1]))
    assert panel.failures == {"grammar": 1}


def test_a_name_that_there_is_none_of_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"speculation\.guessers\[1\] must be one of draft, .*, got 'oracle'"):
        check_sources(SpeculationConfig(guessers=("draft", "oracle")))


@pytest.mark.parametrize("name", NEED_INDEX)
def test_who_knows_a_corpus_is_refused_where_there_is_no_index(name):
    with pytest.raises(ConfigError, match=r"guessers\[1\] needs speculation\.retrieval_index"):
        check_sources(SpeculationConfig(guessers=("draft", name)))
    check_sources(SpeculationConfig(guessers=("draft", name), retrieval_index="corpus.index"))


def test_controls_are_in_no_default():
    assert not {*CONTROLS} & {*SpeculationConfig().guessers}


def test_corpora_can_be_asked_for_where_there_is_an_index():
    assert available_sources(SpeculationConfig()) == tuple(name for name in SOURCES if name not in NEED_INDEX)
    assert available_sources(SpeculationConfig(retrieval_index="corpus.index")) == SOURCES


def test_the_head_guesses_where_the_target_has_one_and_only_below_the_text_of_its_verdict():
    guessers = Guessers()
    without = guessers.panel(["head"], SpeculationConfig(), 4, SourcePrecision(), 50)
    assert not without.awaits_guesses
    panel = guessers.panel(["head"], SpeculationConfig(), 4, SourcePrecision(), 50, has_head=True)
    assert panel.awaits_guesses
    panel.deliver(Guesses((ROOT, ROOT), (7, 9), (0.5, 0.25)), num_tokens=3)
    ((source, guesses),) = panel.ask([1, 2, 3])
    assert (source, guesses.tokens) == ("head", (7, 9))
    assert panel.ask([1, 2, 3, 7]) == [], "they were for the text before"
    panel.deliver(Guesses((ROOT,), (50,), (0.5,)), num_tokens=4)
    assert panel.ask([1, 2, 3, 7]) == [], "a token outside the vocabulary"
    assert panel.failures == {"head": 1}
