"""Predictions are those of the closed forms where verification is free, and fall where rows are dear."""

import pytest

from core import theory
from deploy.measure.prediction import STREAMS, Prediction, Timing, pays_up_to, predict

FLAT = Timing("flat", lambda _: 0.02, lambda _: 0.002)
BY_ROW = Timing("by row", lambda rows: 0.02 * rows, lambda rows: 0.002 * rows)
CHAIN = [0.8] * 8


def test_where_rows_are_free_it_is_theorem_3_8():
    found = predict(CHAIN, FLAT, is_pipelined=False)
    best = theory.optimal_gamma(lambda gamma: theory.walltime_factor(0.8, gamma, FLAT.c), 8)
    assert [each.gamma for each in found] == [best] * len(STREAMS)
    assert [each.factor for each in found] == pytest.approx([theory.walltime_factor(0.8, best, 0.1)] * len(STREAMS))
    assert pays_up_to(found) == STREAMS[-1]


def test_a_hidden_draft_is_free_until_it_takes_as_long_as_verification():
    found = predict(CHAIN, FLAT, is_pipelined=True)[0]
    assert (found.gamma, found.factor) == (8, pytest.approx(theory.pipelined_factor(0.8, 8, 0.1)))


def test_where_each_row_has_its_price_nothing_is_gained():
    found = predict(CHAIN, BY_ROW, is_pipelined=False)
    assert [(each.gamma, each.factor) for each in found] == [(0, 1.0)] * len(STREAMS)
    assert pays_up_to(found) == 0


def test_a_guesser_takes_its_own_time_for_each_stream():
    """Half a target pass for each: two streams wait for a whole one."""
    found = predict([1.0], FLAT, 0.01, is_pipelined=False)
    assert (found[0].gamma, found[0].factor) == (1, pytest.approx(2 / 1.5))
    assert (found[1].gamma, found[1].factor) == (0, 1.0), "two tokens in twice the time are no gain"


def test_drafting_pays_up_to_where_it_stops_for_the_first_time():
    factors = (1.5, 1.2, 1.0, 1.3)
    assert pays_up_to(Prediction(2**place, 1, factor) for place, factor in enumerate(factors)) == 2
    assert pays_up_to([Prediction(1, 1, 1.02)]) == 0


def test_without_a_draft_a_draft_pass_costs_nothing():
    assert Timing("alone", lambda _: 0.02).c == 0
    assert FLAT.c == pytest.approx(0.1)
