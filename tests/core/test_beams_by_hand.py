"""Beam search by hand: which beams go on, which end, and when it stops."""

from __future__ import annotations

import math
from random import Random

import pytest

from core.beams import Beams
from core.records import BeamSearch

END = 0


def logs(**probs: float) -> tuple[tuple[int, float], ...]:
    """Likeliest tokens, named t1, t2, ...; the ending one is t0."""
    return tuple((int(name[1:]), math.log(prob)) for name, prob in probs.items())


def beams(search: BeamSearch, max_tokens: int = 10, num_before: int = 0) -> Beams:
    return Beams(search, frozenset({END}), max_tokens, num_before)


def live(found: Beams) -> list[tuple[int, ...]]:
    return [beam.tokens for beam in found.live]


def ended(found: Beams) -> list[tuple[int, ...]]:
    return [each.beam.tokens for each in found.ended]


def test_a_beam_may_be_followed_by_several_and_another_by_none() -> None:
    found = beams(BeamSearch(2, 2))
    found.step([logs(t1=0.6, t2=0.4)])
    found.step([logs(t3=0.5, t4=0.4, t5=0.1), logs(t6=0.1, t7=0.1)])
    assert live(found) == [(1, 3), (1, 4)]
    assert found.num_shared == 1


def test_of_equals_the_better_beam_is_first_then_the_lower_token() -> None:
    found = beams(BeamSearch(3, 1))
    found.step([logs(t5=0.25, t2=0.25, t4=0.25, t3=0.25)])
    assert live(found) == [(2,), (3,), (4,)]
    found.step([logs(t9=0.5), logs(t8=0.5), logs(t7=0.5)])
    assert live(found) == [(2, 9), (3, 8), (4, 7)]


def test_a_beam_that_ends_makes_room_for_the_next() -> None:
    found = beams(BeamSearch(2, 2))
    found.step([logs(t0=0.5, t1=0.3, t2=0.2)])
    assert (live(found), ended(found)) == ([(1,), (2,)], [(END,)])


def test_one_that_ends_counts_only_among_the_best() -> None:
    """It is but a substitute: the third of two beams would not have been kept either."""
    found = beams(BeamSearch(2, 2))
    found.step([logs(t1=0.5, t2=0.3, t0=0.2)])
    assert (live(found), ended(found)) == ([(1,), (2,)], [])


def test_a_score_is_over_the_length_with_its_end_to_the_power_of_the_penalty() -> None:
    found = beams(BeamSearch(1, 1, length_penalty=2.0), num_before=1)
    found.step([logs(t1=0.5, t2=0.1)])
    found.step([logs(t0=0.5, t2=0.1)])
    (each,) = found.ended
    assert each.score == pytest.approx(2 * math.log(0.5) / 3**2)


@pytest.mark.parametrize(("early_stopping", "is_done"), [(True, True), (False, False), ("never", False)])
def test_with_as_many_ended_as_beams_it_stops_only_if_that_is_asked(early_stopping, is_done) -> None:
    """The live beam may still become the better one."""
    found = beams(BeamSearch(1, 1, 1.0, early_stopping))
    found.step([logs(t0=0.4, t1=0.39)])
    found.step([logs(t1=0.99, t2=0.01)])
    assert found.is_done is (is_done or found.is_done)
    assert len(found.ended) == 1
    assert is_done or found.live[0].score / 2 > found.ended[0].score


def test_it_stops_where_the_best_beam_is_worse_than_all_that_have_ended() -> None:
    found = beams(BeamSearch(1, 1))
    found.step([logs(t0=0.9, t1=0.1)])
    assert found.is_done


def test_never_hopes_for_the_longest_length_and_the_default_for_the_present_one() -> None:
    for early_stopping, is_done in ((False, True), ("never", False)):
        found = beams(BeamSearch(1, 1, 1.0, early_stopping))
        found.step([logs(t0=0.6, t1=0.3)])
        assert found.is_done is is_done, early_stopping


def test_the_last_allowed_token_ends_all_beams() -> None:
    found = beams(BeamSearch(2, 2), max_tokens=1)
    found.step([logs(t1=0.6, t2=0.3, t3=0.1)])
    assert (found.is_done, ended(found)) == (True, [(1,), (2,)])


def test_a_better_output_takes_the_place_of_the_worst() -> None:
    found = beams(BeamSearch(1, 1, early_stopping="never"))
    found.step([logs(t0=0.3, t1=0.29)])
    found.step([logs(t0=0.99, t1=0.01)])
    assert ended(found) == [(1, END)]


def test_a_beam_that_nothing_may_follow_is_dropped_and_the_others_go_on() -> None:
    found = beams(BeamSearch(2, 2))
    found.step([logs(t1=0.6, t2=0.4)])
    found.step([(), logs(t3=0.5, t4=0.4)])
    assert live(found) == [(2, 3), (2, 4)]


def test_where_nothing_may_follow_it_is_done() -> None:
    found = beams(BeamSearch(2, 2))
    found.step([logs(t1=1.0)])
    found.step([()])
    assert found.is_done
    assert found.outputs == []


@pytest.mark.parametrize("seed", range(20))
def test_so_many_tokens_after_each_beam_decide_as_all_tokens_do(seed: int) -> None:
    """Also where the likeliest ones end beams."""
    random, ending = Random(seed), frozenset(range(3))
    search = BeamSearch(4, 4, early_stopping="never")
    count = Beams.num_likeliest(search, len(ending))
    whole, cut = Beams(search, ending, 10), Beams(search, ending, 10)
    while not whole.is_done:
        rows = [[(token, -random.random() - (token > 4)) for token in range(30)] for _ in whole.live]
        ordered = [tuple(sorted(row, key=lambda each: -each[1])) for row in rows]
        whole.step(ordered)
        cut.step([row[:count] for row in ordered])
        assert (cut.live, cut.ended) == (whole.live, whole.ended)
