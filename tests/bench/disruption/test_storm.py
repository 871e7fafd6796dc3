"""How a storm of kills is judged."""

from __future__ import annotations

import pytest

from bench.disruption.storm import StreamWatcher, _results


@pytest.fixture
def watcher():
    return StreamWatcher(expected=(5, 6, 7, 8), began_s=10.0)


def test_the_longest_gap_may_be_before_the_first_token_between_two_or_after_the_last(watcher):
    assert watcher.longest_gap_s(13.0) == 3.0
    watcher.record([5], 0, 11.0)
    watcher.record([6], 1, 15.0)
    assert watcher.longest_gap_s(16.0) == 4.0
    assert watcher.longest_gap_s(20.0) == 5.0


def test_a_chunk_counts_as_changed_where_plain_decoding_has_other_tokens(watcher):
    watcher.record([5, 6], 0, 11.0)
    watcher.record([7], 2, 12.0)
    assert watcher.num_changed == 0
    watcher.record([7], 3, 13.0)
    watcher.record([5, 6], 0, 14.0)  # another stream of the same completion
    assert (watcher.num_changed, watcher.num_tokens) == (1, 6)


def test_one_bad_watcher_is_enough_to_miss(watcher):
    worse = StreamWatcher(expected=(), began_s=0.0, num_failed=1)
    gap, failed, changed = _results("t", [watcher, worse], 25.0)
    assert (gap.value, failed.value, changed.value) == (25.0, 1, 0)
