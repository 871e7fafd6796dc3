"""A session keeps the target's features of its last tokens, in order, whatever verdicts bring."""

from __future__ import annotations

from core.records import MAX_FEATURE_TOKENS, Features
from orchestrator.session.drafts.feature_log import FeatureLog


def features(first, end):
    """Each row is its position."""
    rows = b"".join(position.to_bytes(2, "little") for position in range(first, end))
    return Features(first, 1, rows)


def positions(known):
    return [int.from_bytes(known.rows[start : start + 2], "little") for start in range(0, len(known.rows), 2)]


def log_of(*pieces):
    log = FeatureLog()
    for piece in pieces:
        log.add(features(*piece))
    return log


def test_verdicts_follow_each_other():
    log = log_of((0, 5), (5, 6), (6, 9))
    assert (log.first, log.end) == (0, 9)
    for position in range(9):
        known = log.since(position)
        assert (known.first, positions(known)) == (position, list(range(position, 9)))


def test_nothing_is_known_at_first():
    assert FeatureLog().since(0) is None
    assert FeatureLog().end == 0


def test_a_new_target_brings_some_again():
    assert positions(log_of((2, 5), (3, 7)).since(0)) == [2, 3, 4, 5, 6]
    assert positions(log_of((2, 5), (1, 7)).since(0)) == [1, 2, 3, 4, 5, 6]


def test_after_a_gap_only_the_newer_ones_count():
    known = log_of((0, 5), (7, 9)).since(0)
    assert (known.first, positions(known)) == (7, [7, 8])


def test_old_ones_are_dropped():
    log = log_of(*((position, position + 1) for position in range(3 * MAX_FEATURE_TOKENS)))
    assert log.end - log.first <= MAX_FEATURE_TOKENS + 1
    assert positions(log.since(0))[-1] == log.end - 1
