"""A session's guessers: believed as far as they were right, and left out, counted and logged once when they fail."""

from __future__ import annotations

import logging
import math

import pytest

from core.speculation.calibration import PRIOR
from core.speculation.guesser import MAX_GUESSES, NO_GUESSES, BadGuesserInput, Guesses
from core.speculation.source_precision import Record, SourcePrecision
from core.speculation.token_tree import ROOT, TokenTree
from orchestrator.guessers.breaker import MAX_FAILURES, TRIAL_SESSIONS, Breaker
from orchestrator.guessers.panel import Panel

VOCAB_SIZE = 50
TREE = Guesses((ROOT, 0, ROOT, 2), (3, 4, 5, 6), (0.5, 1.0, 0.25, 1.0))


class Says:
    """Always the same."""

    def __init__(self, answer):
        self.answer = answer
        self.num_asked = 0

    def propose(self, text):
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def precision():
    return SourcePrecision()


def panel(precision, breakers=None, **answers):
    breakers = breakers or {name: Breaker(name) for name in answers}
    return Panel({name: Says(answer) for name, answer in answers.items()}, breakers, precision, VOCAB_SIZE)


def test_what_a_guesser_says_is_corrected_by_what_is_known_of_it(precision):
    ((source, guesses),) = panel(precision, a=TREE, b=NO_GUESSES).ask([1, 2])
    assert (source, guesses.parents, guesses.tokens) == ("a", TREE.parents, TREE.tokens)
    assert guesses.chances == pytest.approx((0.5 * PRIOR, PRIOR, 0.25 * PRIOR, PRIOR))


@pytest.mark.parametrize(
    ("committed", "claimed", "num_right"),
    [
        ([3, 4, 9], (0.75, 1.0), 2),
        ([5, 9], (0.75, 1.0), 1),
        ([5], (0.75,), 1),
        ([9, 3, 4], (0.75,), 0),
    ],
)
def test_it_is_judged_wherever_the_text_went_on_as_it_had_guessed(precision, committed, claimed, num_right):
    asked, by_hand = panel(precision, a=TREE), Record()
    asked.ask([1, 2])
    asked.observe(committed)
    asked.observe([3, 4])
    for number, each in enumerate(claimed):
        by_hand.observe(each, is_right=number < num_right)
    assert precision.of("a") == by_hand


def test_each_source_is_learned_apart(precision):
    for _ in range(300):
        precision.observe("a", 1.0, is_right=False)
        precision.observe("b", 1.0, is_right=True)
    assert precision.calibrated("a", (1.0, 0.5)) == pytest.approx((0.0, 0.0), abs=0.01)
    assert precision.calibrated("b", (1.0,)) == pytest.approx((0.99,), abs=0.01)
    assert precision.calibrated("c", (1.0,)) == (PRIOR,)


def test_a_source_that_claims_too_much_is_scaled_to_what_comes(precision):
    for index in range(2000):
        precision.observe("a", 0.8, is_right=index % 4 == 0)
    assert precision.calibrated("a", (0.8, 0.4)) == pytest.approx((0.25, 0.125), abs=0.03)


NONSENSE = {
    "an id beyond the vocabulary": Guesses.chain([VOCAB_SIZE], [0.5]),
    "a negative id": Guesses.chain([-1], [0.5]),
    "an id that is no number": Guesses.chain(["x"], [0.5]),
    "a fraction of an id": Guesses.chain([1.5], [0.5]),
    "a parent that does not exist": Guesses((7,), (1,), (0.5,)),
    "a parent that comes later": Guesses((1, ROOT), (1, 2), (0.5, 0.5)),
    "its own parent": Guesses((0,), (1,), (0.5,)),
    "a parent before the root": Guesses((-2,), (1,), (0.5,)),
    "a chance beyond 1": Guesses.chain([1], [1.5]),
    "a chance that is no number": Guesses.chain([1], [math.nan]),
    "columns that differ": Guesses((ROOT,), (1, 2), (0.5,)),
    "a flood": Guesses.chain([1] * (MAX_GUESSES + 1), [0.5] * (MAX_GUESSES + 1)),
    "nothing at all": None,
    "an error": RuntimeError("the guesser is broken"),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
def test_whoever_raises_or_answers_nonsense_costs_itself_alone(precision, answer):
    breakers = {name: Breaker(name) for name in ("a", "b")}
    asked = panel(precision, breakers, a=answer, b=TREE)
    liar = asked._guessers["a"]
    for _ in range(3):
        assert [source for source, _ in asked.ask([1, 2])] == ["b"]
        asked.observe([3])
    assert liar.num_asked == 1
    assert asked.failures == {"a": 1}
    assert (breakers["a"].num_failures, breakers["b"].num_failures) == (1, 0)
    assert precision.of("a") == Record()


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_trial(caplog):
    breaker = Breaker("a")
    with caplog.at_level(logging.WARNING):
        for _ in range(MAX_FAILURES):
            assert breaker.admits()
            breaker.failed(ValueError("nonsense"))
    assert len(caplog.records) == 1, "logged once"
    assert [breaker.admits() for _ in range(2 * TRIAL_SESSIONS)].count(True) == 2
    breaker.worked()
    assert breaker.admits()
    assert breaker.num_failures == MAX_FAILURES


def test_failures_with_sound_answers_in_between_open_nothing():
    breaker = Breaker("a")
    for _ in range(10):
        breaker.failed(ValueError())
        breaker.worked()
    assert breaker.admits()


def test_what_requests_bring_counts_in_their_sessions_and_opens_nothing_for_others(precision, caplog):
    breakers = {"a": Breaker("a")}
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * MAX_FAILURES):
            asked = panel(precision, breakers, a=BadGuesserInput("a bad grammar"))
            assert (asked.ask([1, 2]), asked.ask([1, 2])) == ([], [])
            assert asked.failures == {"a": 1}
    assert not caplog.records
    assert breakers["a"].num_failures == 3 * MAX_FAILURES
    assert all(breakers["a"].admits() for _ in range(3))


def test_a_request_s_fault_is_no_sound_answer_either():
    breaker = Breaker("a")
    for _ in range(MAX_FAILURES):
        breaker.failed(ValueError())
        breaker.failed(BadGuesserInput())
    assert breaker.is_open


class Keeps(Says):
    """Keeps the texts that have ended, or cannot."""

    def ended(self, text):
        if isinstance(self.answer, Exception):
            raise self.answer
        self.kept = list(text)


def test_a_text_that_has_ended_is_told_to_those_that_keep_outputs_and_costs_nobody_else(precision):
    breakers = {name: Breaker(name) for name in ("a", "b", "c")}
    history = Keeps(TREE)
    asked = Panel({"a": Keeps(ValueError()), "b": Says(TREE), "c": history}, breakers, precision, VOCAB_SIZE)
    asked.ended([1, 2, 3])
    assert history.kept == [1, 2, 3]
    assert asked.failures == {"a": 1}
    assert [breakers[name].num_failures for name in "abc"] == [1, 0, 0]


class Asks(Says):
    """Asks always the same, and keeps the answers."""

    def __init__(self, asked, told=None):
        super().__init__(NO_GUESSES)
        self.asked = asked
        self.told = told
        self.answers = []

    def questions(self, text):
        if isinstance(self.asked, Exception):
            raise self.asked
        return self.asked

    def answered(self, samples):
        if self.told is not None:
            raise self.told
        self.answers.append(list(samples))


def asking(precision, **guessers):
    return Panel(guessers, {name: Breaker(name) for name in guessers}, precision, VOCAB_SIZE)


def test_the_first_that_has_questions_asks_and_gets_the_answers(precision):
    window = TokenTree.chain([3, 4])
    first, second = Asks(window), Asks(TokenTree.chain([5]))
    told = asking(precision, a=Says(NO_GUESSES), b=first, c=second)
    assert told.questions([1, 2]) == ("b", window)
    told.answered("b", [7, 8, 9])
    assert (first.answers, second.answers) == ([[7, 8, 9]], [])


def test_who_has_no_questions_asks_none(precision):
    assert asking(precision, a=Asks(TokenTree())).questions([1]) is None
    assert asking(precision, a=Says(NO_GUESSES)).questions([1]) is None


@pytest.mark.parametrize(
    "asked",
    [
        RuntimeError("broken"),
        TokenTree.chain([VOCAB_SIZE]),
        TokenTree.chain([-1]),
        TokenTree.chain([1] * (MAX_GUESSES + 1)),
        None,
        7,
    ],
    ids=str,
)
def test_who_asks_nonsense_is_left_out_and_counted_and_the_next_one_asks(precision, asked):
    window = TokenTree.chain([3])
    both = asking(precision, bad=Asks(asked), good=Asks(window))
    assert both.questions([1]) == ("good", window)
    assert both.failures == {"bad": 1}
    assert both.questions([1]) == ("good", window)


def test_who_fails_at_the_answers_is_left_out(precision):
    alone = asking(precision, a=Asks(TokenTree.chain([3]), told=IndexError("no")))
    alone.answered(alone.questions([1])[0], [1, 2])
    assert (alone.failures, alone.questions([1])) == ({"a": 1}, None)
