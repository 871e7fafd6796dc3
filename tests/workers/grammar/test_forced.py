"""Tokens that a grammar forces: each is the only one that masks let through, and is found without waiting."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from core.config import SpeculationConfig
from core.records import GrammarKind
from core.speculation import NO_GUESSES, SourcePrecision
from core.speculation.token_tree import ROOT
from orchestrator.guessers import Guessers, OutputForm
from tests.workers.grammar.grammars import (
    EOS,
    PERSON,
    VOCAB_SIZE,
    at_once,
    compiler,
    following,
    ids,
    lark,
    regex,
    schema,
    tokenizer,
)
from workers.grammar.cache import Grammars
from workers.grammar.compiler import GrammarProblem
from workers.grammar.forced import MAX_NEW_TOKENS, MAX_NODES, ForcedTokens

DEPTH = 8
STATUS = {
    "type": "object",
    "properties": {"state": {"enum": ["accepted", "rejected"]}, "kind": {"const": "a long constant text"}},
    "required": ["state", "kind"],
    "additionalProperties": False,
}
GRAMMARS = [
    schema(PERSON),
    schema(STATUS),
    regex(r"version = [0-9]{1,2}\.[0-9] of the release"),
    regex("positive sentiment|negative sentiment|neutral"),
    lark('start: "if " NAME ":" | "while " NAME ":"\nNAME: /[a-z]{1,4}/'),
]


def forced(grammar):
    return ForcedTokens(at_once(grammar))


def path_of(guesses, node):
    path = []
    while node != ROOT:
        path.append(guesses.tokens[node])
        node = guesses.parents[node]
    return path[::-1]


def words(grammar, seed, max_tokens=60):
    """An output of it, each token drawn among those that may come, and each beginning of it."""
    generator, output = np.random.default_rng(seed), []
    while len(output) < max_tokens and (allowed := [each for each in following(grammar, output) if each != EOS]):
        yield list(output)
        output.append(int(generator.choice(allowed)))
    yield list(output)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text[:20])
@pytest.mark.parametrize("seed", range(3))
def test_what_counts_as_certain_is_all_that_may_come_and_what_is_one_of_several_is_one_of_all(grammar, seed):
    """The law: a chance of 1 where masks let one token through; where more may come they are all there."""
    session, num_certain, num_shared = forced(grammar), 0, 0
    for output in words(grammar, seed):
        guesses = session.after(output, DEPTH)
        guesses.check(VOCAB_SIZE)
        assert guesses == forced(grammar).after(output, DEPTH), "whatever was asked before"
        for node, chance in enumerate(guesses.chances):
            path = path_of(guesses, node)
            siblings = [other for other in range(len(guesses)) if guesses.parents[other] == guesses.parents[node]]
            allowed = following(grammar, [*output, *path[:-1]])
            assert sorted(guesses.tokens[each] for each in siblings) == allowed
            assert chance == 1.0 / len(allowed)
            assert len(path) <= DEPTH
            num_certain += chance == 1.0
            num_shared += chance < 1.0
    assert num_certain
    assert num_shared or grammar.kind is not GrammarKind.JSON_SCHEMA


def test_keys_of_a_schema_choices_and_literals_are_forced():
    assert forced(regex("yes, it is")).after([], DEPTH).tokens == tuple(ids("yes, it is"))
    choice = regex("perhaps it is so|never")
    started = ids("perhaps")[:1]
    guesses = forced(choice).after(started, 20)
    assert [*started, *guesses.tokens] == ids("perhaps it is so")
    assert set(guesses.chances) == {1.0}
    begun = [*ids("{"), *ids('"')]
    guesses = forced(schema(STATUS)).after(begun, DEPTH)
    certain = [token for token, chance in zip(guesses.tokens, guesses.chances, strict=True) if chance == 1.0]
    assert tokenizer().decode([*begun, *certain]).startswith('{"state')


def test_no_end_is_guessed_and_nothing_behind_it():
    word = regex("yes")
    assert EOS not in forced(word).after([], DEPTH).tokens
    assert not len(forced(word).after(ids("yes"), DEPTH))


def test_nothing_is_guessed_until_it_has_been_compiled_and_nobody_waits():
    done = Future()
    session = ForcedTokens(done)
    assert not len(session.after([], DEPTH))
    done.set_result(compiler().compile(regex("yes, it is")))
    assert len(session.after([], DEPTH))


@pytest.mark.parametrize("bad", [regex("(("), schema({"not": {}})])
def test_what_does_not_compile_is_raised_by_its_reason(bad):
    session = ForcedTokens(at_once(bad))
    with pytest.raises(GrammarProblem):
        session.after([], DEPTH)


def test_what_refuses_an_output_that_is_held_to_the_grammar_is_compiled_anew():
    """It is a limit of what all outputs share: the next one would run into it at once."""
    compiled = at_once(regex("yes"))
    with pytest.raises(GrammarProblem, match="forbids"):
        ForcedTokens(compiled).after(ids("no"), DEPTH)
    assert compiled.result().is_exhausted


def test_an_output_that_the_grammar_forbids_is_a_problem():
    with pytest.raises(GrammarProblem, match="forbids"):
        forced(regex("yes")).after(ids("no"), DEPTH)


def test_grammars_that_cannot_be_followed_take_the_guesser_from_nobody_else():
    """Callers send such grammars again and again, and one sends another."""
    grammars = Grammars(compiler, VOCAB_SIZE, 8)
    guessers, config = Guessers(None, grammars), SpeculationConfig()

    def panel(grammar):
        return guessers.panel(["grammar"], config, DEPTH, SourcePrecision(), VOCAB_SIZE, OutputForm(2, grammar))

    for bad in [regex("(("), schema({"not": {}}), regex("yes"), regex("((("), regex("[")] * 2:
        asked = panel(bad)
        while not asked.failures:  # it is compiled meanwhile
            assert not asked.ask([1, 2, *ids("no")])
        assert asked.failures == {"grammar": 1}
    other = panel(regex("yes, it is"))
    while not (answers := other.ask([1, 2])):
        pass
    assert answers[0][0] == "grammar"
    assert other.failures == {}
    grammars.close()


def test_a_long_output_is_taken_in_bit_by_bit():
    grammar = regex("[ab]{1,9999}, that is all")
    output = ids("a, ")[:1] * (2 * MAX_NEW_TOKENS + 5)
    session = forced(grammar)
    for _ in range(3):
        assert len(output) > session._num_taken
        session.after(output, DEPTH)
    assert len(output) == session._num_taken


def test_a_long_run_is_looked_for_once():
    session = forced(regex("x" + "hello world, " * 300))
    whole = ids("x" + "hello world, " * 300)
    first = session.after([], DEPTH)
    run = session._run
    assert len(run) > 500
    session._forced = None  # would be called
    assert session.after(run[:9], DEPTH).tokens == tuple(run[9 : 9 + DEPTH])
    assert first.tokens == tuple(run[:DEPTH])
    assert len(whole) == len(run)


def test_trees_stay_small_however_many_branches_there_are():
    grammar = regex("(ab|a-|a\\+|a\\*){30}")
    guesses = forced(grammar).after([], 64)
    assert len(guesses) <= MAX_NODES + 64


def test_a_session_asks_for_its_grammar_of_what_is_kept():
    grammars = Grammars(compiler, VOCAB_SIZE, max_kept=2)
    grammar = regex("yes, it is")
    grammars.compile(grammar)
    assert grammars.forced(grammar).after([], DEPTH).tokens == tuple(ids("yes, it is"))
    grammars.close()


@pytest.mark.parametrize("num_new", [1, 400])
def test_a_grammar_of_many_readings_is_left_before_it_holds_up_the_caller(num_new):
    """Each token takes longer than the one before: 0.3 s after a hundred, and minutes for all of these."""
    guesser = forced(lark('start: s\ns: s s s | s s | "a" | "b" | "c"'))
    (token,) = ids("a")
    for num_tokens in range(num_new, 401, num_new):
        assert guesser.after([token] * num_tokens, DEPTH) is NO_GUESSES or num_tokens < 100
    assert guesser._num_taken < 200
