"""Whether a beam search drafts: by the time of a token with and without a draft."""

from __future__ import annotations

from orchestrator.session.beams.pace import TRY_ROUNDS, Pace


def ways(pace: Pace, num_rounds: int, drafted: tuple[float, int], plain: tuple[float, int]) -> list[bool]:
    """What it chooses, if rounds take these seconds for this number of tokens."""
    found = []
    for _ in range(num_rounds):
        found.append(pace.is_drafting)
        pace.observe(found[-1], *(drafted if found[-1] else plain))
    return found


def test_the_quicker_way_is_taken_and_the_other_one_tried_now_and_then() -> None:
    quick, slow = ways(Pace(False), 100, (2.0, 4), (1.0, 1)), ways(Pace(False), 100, (2.0, 1), (1.0, 1))
    assert 80 < sum(quick) < 100
    assert 0 < sum(slow) < 20


def test_the_first_round_with_a_draft_does_not_count() -> None:
    """It has the draft's prefill."""
    pace = Pace(False)
    pace.observe(True, 1000.0, 1)
    assert ways(pace, TRY_ROUNDS - 3, (2.0, 4), (1.0, 1))[2:] == [True] * (TRY_ROUNDS - 5)


def test_a_policy_that_always_drafts_does() -> None:
    assert all(ways(Pace(True), 50, (9.0, 1), (1.0, 1)))
