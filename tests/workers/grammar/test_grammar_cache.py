"""Grammars are compiled once each, beside the engine's thread, and few are kept."""

import threading

import pytest
from grammars import VOCAB_SIZE, allowed, compiler, ids, regex

from workers.grammar.cache import Grammars
from workers.grammar.compiler import GrammarProblem


class Counting:
    """A compiler that can be held up."""

    vocab_size = VOCAB_SIZE

    def __init__(self):
        self.compiled = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def compile(self, grammar):
        assert self.may_go_on.wait(10)
        self.compiled.append(grammar.text)
        return compiler().compile(grammar)


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def grammars(counting):
    made = Grammars(lambda: counting, VOCAB_SIZE, max_kept=2)
    yield made
    made.close()


def test_a_grammar_is_compiled_once_and_the_one_used_longest_ago_is_let_go(grammars, counting):
    for text in "abacb":
        grammars.compile(regex(text))
    assert counting.compiled == ["a", "b", "c", "b"]


def test_a_state_is_ready_when_its_grammar_is_compiled_and_not_waited_for(grammars, counting):
    counting.may_go_on.clear()
    state = grammars.state(regex("ab"), None)
    assert not state.is_ready
    state.wait(0.0)
    counting.may_go_on.set()
    state.wait(10.0)
    assert state.is_ready
    assert grammars.state(regex("ab"), None).is_ready, "it is kept"
    (mask,) = state.masks(ids("a"), [()])
    assert allowed(mask) == ids("b")


def test_a_sequence_keeps_its_state_while_its_grammar_is_the_same(grammars):
    state = grammars.state(regex("a"), None)
    assert grammars.state(regex("a"), state) is state
    assert grammars.state(regex("b"), state).grammar == regex("b")
    assert grammars.state(None, state) is None


def test_what_has_run_into_a_limit_is_compiled_anew(grammars, counting):
    grammars.compile(regex("a")).is_exhausted = True
    assert not grammars.compile(regex("a")).is_exhausted
    assert counting.compiled == ["a", "a"]


def test_without_a_tokenizer_each_grammar_is_refused(caplog):
    def make():
        raise GrammarProblem("no tokenizer")

    grammars = Grammars(make, VOCAB_SIZE, max_kept=2)
    grammars.prepare()
    assert "structured output is not served: no tokenizer" in caplog.text
    with pytest.raises(GrammarProblem, match="no tokenizer"):
        grammars.compile(regex("a"))
    grammars.close()
