"""Beam searches draft while that is quicker, and the slower way is tried less and less often."""

from __future__ import annotations

from itertools import pairwise

from orchestrator.session.beams.pace import MAX_WAIT, MIN_WAIT, Pace, SearchPace


def ways(pace: Pace, num_rounds: int, drafted: tuple[float, int], plain: tuple[float, int]) -> list[bool]:
    """Whether each round was drafted for, if a round takes so many seconds for so many tokens."""
    found = []
    for _ in range(num_rounds):
        found.append(pace.is_drafting)
        pace.observe(found[-1], *(drafted if found[-1] else plain))
    return found


def test_the_quicker_way_is_taken_and_the_other_one_tried_less_often_each_time():
    for drafted, usual in (((2.0, 4), True), ((2.0, 1), False)):
        found = ways(Pace(), 16 * MAX_WAIT, drafted, (1.0, 1))
        tries = [number for number, way in enumerate(found) if way != usual and number > 1]
        waits = [after - before for before, after in pairwise(tries)]
        assert tries[0] == MIN_WAIT
        assert waits[:3] == [2 * MIN_WAIT + 1, 4 * MIN_WAIT + 1, 8 * MIN_WAIT + 1]
        assert max(waits) == MAX_WAIT + 1


def test_a_way_that_has_become_quicker_is_taken():
    pace = Pace()
    ways(pace, 100, (2.0, 1), (1.0, 1))
    found = ways(pace, 20 * MAX_WAIT, (0.1, 1), (1.0, 1))
    assert sum(found[-MAX_WAIT:]) > MAX_WAIT - 10


def test_the_rounds_that_read_a_prompt_are_not_measured():
    shared = Pace()
    search = SearchPace(shared, is_always_drafted=False)
    search.round_ended(100.0, 1, is_drafted=False)
    assert shared._seconds == {}
    search.round_ended(101.0, 1, is_drafted=False)
    search.round_ended(150.0, 1, is_drafted=True)
    assert shared._seconds == {False: 1.0}
    search.round_ended(152.0, 4, is_drafted=True)
    assert shared._seconds == {False: 1.0, True: 0.5}


def test_a_round_in_which_the_target_was_lost_is_not_measured():
    shared = Pace()
    search = SearchPace(shared, is_always_drafted=False)
    for now_s in (0.0, 1.0):
        search.round_ended(now_s, 1, is_drafted=False)
    search.target_lost()
    search.round_ended(90.0, 1, is_drafted=False)
    assert shared._seconds == {False: 1.0}


def test_a_policy_that_always_drafts_does_where_it_is_slower():
    shared = Pace()
    ways(shared, 10, (9.0, 1), (1.0, 1))
    assert not SearchPace(shared, is_always_drafted=False).is_drafting
    assert SearchPace(shared, is_always_drafted=True).is_drafting
