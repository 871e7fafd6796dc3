"""Where verification asks what a guess was drawn from: whose laws are drawn from, and what is learned of them."""

from __future__ import annotations

import math

import pytest

from core.speculation.calibration import PRIOR
from core.speculation.guesser import MAX_DISTRIBUTION_TOKENS, MAX_GUESSES, NO_GUESSES, Guesses
from core.speculation.source_precision import Record, SourcePrecision
from core.speculation.token_tree import NO_Q, ROOT, SparseDistribution
from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.drawing import draw_from
from orchestrator.guessers.panel import Panel

VOCAB_SIZE = 50
TEXT = [1, 2]
FLAT = SparseDistribution((3, 4), (0.5, 0.5))
STEEP = SparseDistribution((5, 6), (0.875, 0.125))
SURE = SparseDistribution((7,), (1.0,))


class Proposes:
    """Always the same."""

    def __init__(self, guesses=NO_GUESSES):
        self.guesses = guesses

    def propose(self, text):
        return self.guesses


class StatesDistributions(Proposes):
    """States one distribution for each number of draws before. An error in place of one is raised."""

    def __init__(self, *distributions):
        super().__init__(Guesses.chain([9], [1.0]))
        self.distributions = distributions
        self.asked = []

    def distribution(self, text, drawn):
        self.asked.append((tuple(text), tuple(drawn)))
        law = self.distributions[len(drawn)] if len(drawn) < len(self.distributions) else NO_Q
        if isinstance(law, Exception):
            raise law
        return law


@pytest.fixture
def precision():
    return SourcePrecision()


def panel(precision, **guessers):
    return Panel(guessers, {name: Breaker(name) for name in guessers}, precision, VOCAB_SIZE)


def always(_):
    return True


def never(_):
    return False


def test_a_chain_is_drawn_from_the_laws_and_told_with_them(precision):
    sampling = StatesDistributions(FLAT, STEEP)
    for seed in range(20):
        ((source, drawn),) = panel(precision, a=sampling).draw(TEXT, seed, always)
        tokens = (draw_from(FLAT, seed, 2, 0), draw_from(STEEP, seed, 3, 1))
        assert (source, drawn.parents, drawn.tokens, drawn.distributions) == ("a", (ROOT, 0), tokens, (FLAT, STEEP))
        assert drawn.chances == pytest.approx((0.5 * PRIOR, 0.875 * PRIOR))
    assert sampling.asked[-1] == ((1, 2), tokens)


def test_whether_to_go_on_is_asked_with_path_probabilities_as_sources_proved_to_be(precision):
    shown = []

    def goes_on(path_prob):
        shown.append(list(path_prob))
        return len(path_prob) < 2

    ((_, drawn),) = panel(precision, a=StatesDistributions(FLAT, STEEP, FLAT)).draw(TEXT, 0, goes_on)
    assert len(drawn) == 1
    assert shown == [
        [pytest.approx(0.5 * PRIOR)],
        [pytest.approx(0.5 * PRIOR), pytest.approx(0.5 * PRIOR * 0.875 * PRIOR)],
    ]


def test_where_nothing_needs_to_be_drawn_it_proposes_as_any_other(precision):
    sampling = StatesDistributions(FLAT)
    assert panel(precision, a=sampling).ask(TEXT)[0][1].tokens == (9,)
    assert not sampling.asked


LIKELIER, UNLIKELIER = Guesses.chain([8, 8], [0.6, 1.0]), Guesses.chain([8, 8], [0.4, 1.0])


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ({"b": Proposes(UNLIKELIER)}, ["a"]),
        ({"b": Proposes(LIKELIER)}, ["b"]),
        ({"b": Proposes(LIKELIER), "c": Proposes(UNLIKELIER)}, ["b", "c"]),
        ({"b": Proposes(LIKELIER), "c": StatesDistributions(STEEP)}, ["c"]),
        ({"b": StatesDistributions(NO_Q)}, ["a"]),
        ({}, ["a"]),
    ],
    ids=["likelier than one", "less likely", "than one of them", "another's law", "another knows nothing", "alone"],
)
def test_one_source_is_drawn_from_or_none_as_their_first_guesses_promise(precision, others, chosen):
    """Never both: a draw that another guess agreed with would be sent because of what it is."""
    for seed in range(10):
        found = panel(precision, a=StatesDistributions(FLAT), **others).draw(TEXT, seed, always)
        assert [source for source, _ in found] == chosen
        assert all(bool(guesses.distributions) == (source == "a" or chosen == ["c"]) for source, guesses in found)


def test_what_is_not_worth_drawing_leaves_the_proposals_of_others(precision):
    found = panel(precision, a=StatesDistributions(STEEP), b=Proposes(UNLIKELIER)).draw(TEXT, 0, never)
    assert [source for source, _ in found] == ["b"]
    assert panel(precision, a=StatesDistributions(STEEP)).draw(TEXT, 0, never) == []


def test_a_chain_is_judged_by_what_was_accepted_of_it(precision):
    asked, by_hand = panel(precision, a=StatesDistributions(FLAT, STEEP, FLAT)), Record()
    ((_, drawn),) = asked.draw(TEXT, 4, always)
    first, second, third = drawn.tokens
    asked.observe([first, second, 49 - third])
    for claimed, is_right in ((0.5, True), (0.875, True), (0.5, False)):
        by_hand.observe(claimed, is_right=is_right)
    assert precision.of("a") == by_hand
    asked.observe([1])
    assert precision.of("a") == by_hand, "once"


@pytest.mark.parametrize(("token", "is_right"), [(5, True), (6, False), (9, False)])
def test_a_law_that_nothing_was_drawn_from_is_judged_by_its_likeliest_token(precision, token, is_right):
    """So a source that is not worth its row at present can still prove itself."""
    asked, by_hand = panel(precision, a=StatesDistributions(STEEP), b=StatesDistributions(FLAT)), Record()
    asked.draw(TEXT, 0, never)
    asked.observe([token, 7])
    by_hand.observe(0.875, is_right=is_right)
    assert precision.of("a") == by_hand


@pytest.mark.parametrize(("token", "is_right"), [(3, True), (4, True), (5, False)])
def test_tokens_that_are_equally_likely_are_all_right(precision, token, is_right):
    asked, by_hand = panel(precision, a=StatesDistributions(FLAT), b=StatesDistributions(SURE)), Record()
    assert asked.draw(TEXT, 0, always)[0][0] == "b"
    asked.observe([token])
    by_hand.observe(0.5, is_right=is_right)
    assert precision.of("a") == by_hand


NONSENSE = {
    "an id beyond the vocabulary": SparseDistribution((VOCAB_SIZE,), (1.0,)),
    "a negative id": SparseDistribution((-1,), (1.0,)),
    "an id that is no number": SparseDistribution(("x",), (1.0,)),
    "a token twice": SparseDistribution((1, 1), (0.5, 0.5)),
    "less than a whole": SparseDistribution((1, 2), (0.5, 0.25)),
    "a token that never comes": SparseDistribution((1, 2), (1.0, 0.0)),
    "less than nothing": SparseDistribution((1, 2), (1.5, -0.5)),
    "no number": SparseDistribution((1, 2), (0.5, math.nan)),
    "columns that differ": SparseDistribution((1, 2), (1.0,)),
    "a flood": SparseDistribution.of_counts(
        dict.fromkeys(range(MAX_DISTRIBUTION_TOKENS + 1), 1), MAX_DISTRIBUTION_TOKENS + 1
    ),
    "nothing at all": None,
    "an error": RuntimeError("the guesser is broken"),
}


@pytest.mark.parametrize("law", NONSENSE.values(), ids=NONSENSE.keys())
def test_who_raises_or_says_no_law_costs_itself_alone(precision, law):
    asked = panel(precision, a=StatesDistributions(law), b=Proposes(UNLIKELIER))
    for _ in range(3):
        assert [source for source, _ in asked.draw(TEXT, 0, always)] == ["b"]
        asked.observe([3])
    assert asked.failures == {"a": 1}
    assert precision.of("a") == Record()


def test_what_was_drawn_before_an_error_is_sound(precision):
    asked = panel(precision, a=StatesDistributions(FLAT, RuntimeError("broken")))
    ((_, drawn),) = asked.draw(TEXT, 0, always)
    assert drawn.distributions == (FLAT,)
    assert asked.failures == {"a": 1}
    assert asked.draw(TEXT, 0, always) == []


def test_of_a_guess_and_a_law_that_promise_the_same_the_law_is_drawn_from(precision):
    """Draws are accepted more often than the likeliest token."""
    asked = panel(precision, a=StatesDistributions(FLAT), b=Proposes(Guesses.chain([8], [0.5])))
    assert [source for source, _ in asked.draw(TEXT, 0, always)] == ["a"]


def test_no_chain_is_longer_than_any_block(precision):
    ((_, drawn),) = panel(precision, a=StatesDistributions(*[SURE] * (2 * MAX_GUESSES))).draw(TEXT, 0, always)
    assert len(drawn) == MAX_GUESSES
