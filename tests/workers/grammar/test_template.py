"""Tokens that a template expects of an output that it does not bind, until the output has left it."""

from __future__ import annotations

from random import Random

import pytest

from core.config import SpeculationConfig
from core.speculation import NO_GUESSES, SourcePrecision
from core.speculation.token_tree import ROOT
from orchestrator.guessers import Guessers, OutputForm
from tests.workers.grammar.grammars import EOS, VOCAB_SIZE, at_once, compiler, ids, regex, schema, tokenizer
from workers.grammar.cache import Grammars
from workers.grammar.forced import MAX_NEW_TOKENS, ForcedTokens

DEPTH = 12
LETTER = regex(r"Dear [A-Za-z ]+,\n\nThank you for your order .*\nKind regards")
GREETING = regex("Grüße aus München, 你好 [a-z]+ – schöne Grüße 🎉!")
WORDS = {
    LETTER: "Dear Anna,\n\nThank you for your order 12 of today.\nKind regards",
    GREETING: "Grüße aus München, 你好 anna – schöne Grüße 🎉!",
}


def expected(template):
    return ForcedTokens(at_once(template), is_binding=False)


def run_of(guesses):
    """The chain of those that claim certainty."""
    place, tokens = ROOT, []
    while (child := next((n for n, p in enumerate(guesses.parents) if p == place), None)) is not None:
        if guesses.chances[child] < 1.0:
            break
        tokens.append(guesses.tokens[child])
        place = child
    return tokens


def pieces(text, dice):
    """The text in tokens of many kinds: it is cut at any byte, so that characters, too, are cut, and words are others
    than the usual."""
    output, data = [], text.encode()
    while data:
        size = dice.choice((1, 1, 2, 5, 30))
        output += bytes_as_ids(data[:size])
        data = data[size:]
    return output


def bytes_as_ids(data):
    """The usual tokens of what is text, and else a token for each byte."""
    try:
        return ids(data.decode())
    except UnicodeDecodeError:
        letters = [bytes_to_letter(byte) for byte in data]
        return [tokenizer().token_to_id(letter) for letter in letters]


def bytes_to_letter(byte):
    """The letters that byte-level vocabularies write for bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_by_hand_what_it_forces_is_expected_and_its_slots_are_not():
    def after(text):
        return tokenizer().decode(run_of(expected(LETTER).after(ids(text), DEPTH)))

    assert after("") in ("D", "De", "Dea", "Dear")
    assert after("D") == "ear"
    assert after("Dear Anna") == ""
    assert after("Dear Anna,") == "\n\nThank you for your order"
    assert after("Dear Anna,\n\nThank you for your order 12") == ""
    assert after("Dear Anna,\n\nThank you for your order 12.\n") == "Kind regards"


@pytest.mark.parametrize("template", WORDS, ids=["letter", "not ASCII"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_tokens_a_text_is_made_of_the_same_is_expected_as_of_a_grammar(template, seed):
    """At each token of a word of it: what was asked before is no matter, and all that is certain goes on the word."""
    word, text = pieces(WORDS[template], Random(seed)), WORDS[template].encode()
    session, decode = expected(template), tokenizer().decode
    num_guessed = 0
    for length in range(len(word) + 1):
        guesses = session.after(word[:length], DEPTH)
        guesses.check(VOCAB_SIZE)
        assert guesses == expected(template).after(word[:length], DEPTH)
        assert guesses == ForcedTokens(at_once(template)).after(word[:length], DEPTH)
        if (run := run_of(guesses)) and "\ufffd" not in (whole := decode([*word[:length], *run])):
            assert text.startswith(whole.encode()), "a run is what the word goes on with, whatever its slots hold"
            num_guessed += 1
    assert num_guessed


@pytest.mark.parametrize("num_kept", [0, 1, 7, 20])
@pytest.mark.parametrize("foreign", ["\n", "X", "é"])
def test_once_the_output_has_left_it_nothing_is_expected_and_nothing_is_raised(num_kept, foreign):
    word = ids(WORDS[GREETING])
    session = expected(GREETING)
    session.after(word[:num_kept], DEPTH)
    output = [*word[:num_kept], *ids(foreign)]
    if not compiler().compile(GREETING).allows(output):
        for more in ([], word[num_kept:], ids("Grüße aus")):
            output = [*output, *more]
            assert session.after(output, DEPTH) is NO_GUESSES
    assert session._has_left == (not compiler().compile(GREETING).allows(output))


@pytest.mark.parametrize("rest", [[], [EOS], [EOS, 5], ids(" And so on.")], ids=["", "end", "more", "text"])
def test_behind_its_end_nothing_is_expected(rest):
    assert not len(expected(LETTER).after([*ids(WORDS[LETTER]), *rest], DEPTH))


def test_an_end_in_its_middle_leaves_it():
    assert not len(expected(LETTER).after([*ids("Dear Anna,"), EOS], DEPTH))


def test_what_leaves_it_is_tried_once():
    """Not until its time is used up, in which all streams would wait."""
    session, tried = expected(LETTER), []

    class Matcher:
        def try_consume_tokens(self, tokens):
            tried.append(tokens)
            return 0

        def is_error(self):
            return False

    session._matcher = Matcher()
    session.after(ids("Hello"), DEPTH)
    assert len(tried) == 1


def test_a_long_output_is_taken_in_bit_by_bit_and_left_where_it_leaves():
    session = expected(regex("[ab]{1,9999}, that is all"))
    (letter,) = ids("a")
    output = [*[letter] * (MAX_NEW_TOKENS + 5), *ids("?"), *[letter] * MAX_NEW_TOKENS]
    session.after(output, DEPTH)
    assert not session._has_left
    session.after(output, DEPTH)
    assert session._has_left


def test_templates_that_do_not_compile_take_the_source_from_nobody_else():
    """And one that is left is no failure."""
    grammars = Grammars(compiler, VOCAB_SIZE, 8)
    guessers, config = Guessers(None, grammars), SpeculationConfig()

    def panel(template):
        return guessers.panel([], config, DEPTH, SourcePrecision(), VOCAB_SIZE, OutputForm(2, template=template))

    for bad in [regex("(("), schema({"not": {}}), regex("((("), regex("[")] * 2:
        asked = panel(bad)
        while not asked.failures:  # it is compiled meanwhile
            assert not asked.ask([1, 2, *ids("no")])
        assert asked.failures == {"template": 1}
    other = panel(regex("yes, it is"))
    while not (answers := other.ask([1, 2])):
        pass
    assert answers[0][0] == "template"
    assert not other.ask([1, 2, *ids("no")])
    assert not other.ask([1, 2, *ids("no, yes, it is")])
    assert other.failures == {}
    grammars.close()
