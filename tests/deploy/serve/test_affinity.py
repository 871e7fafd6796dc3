"""Shared prompts meet their KV, unless that would leave a replica with too much to do."""

from __future__ import annotations

import pytest

from deploy.serve import affinity
from deploy.serve.affinity import STRIDE_TOKENS, Affinity, prefix_hashes

REPLICAS = ("a", "b", "c")
SYSTEM = list(range(2 * STRIDE_TOKENS))


def prompt(*tail):
    return prefix_hashes([*SYSTEM, *tail])


def test_beginnings_are_whole_strides_and_bounded():
    assert prefix_hashes(range(STRIDE_TOKENS - 1)) == ()
    assert len(prefix_hashes(range(2 * STRIDE_TOKENS + 5))) == 2
    assert prefix_hashes(range(3 * STRIDE_TOKENS))[:2] == prefix_hashes(range(2 * STRIDE_TOKENS))
    assert len(prefix_hashes([0] * 10_000_000)) == affinity.MAX_STRIDES


def test_a_prompt_leads_where_the_longest_beginning_of_it_was_computed():
    known = Affinity()
    assert known.with_prefix(prompt(), REPLICAS) == set()
    known.began(prompt(), "a")
    known.began(prompt(*range(STRIDE_TOKENS)), "b")
    known.began(prompt(*range(5, 5 + STRIDE_TOKENS)), "c")
    assert known.with_prefix(prompt(*range(STRIDE_TOKENS + 9)), REPLICAS) == {"b"}
    assert known.with_prefix(prompt(7), REPLICAS) == {"a", "b", "c"}
    assert known.with_prefix(prefix_hashes([1, *SYSTEM]), REPLICAS) == set()


def test_replicas_that_are_gone_lead_nowhere():
    known = Affinity()
    known.began(prompt(*range(STRIDE_TOKENS)), "gone")
    known.began(prompt(), "a")
    assert known.with_prefix(prompt(*range(STRIDE_TOKENS)), ("a", "b")) == {"a"}, "the next longest beginning counts"


def test_a_prompt_that_all_share_does_not_keep_all_sessions_on_one_replica():
    known = Affinity()
    counts = dict.fromkeys(REPLICAS, 0)
    for _ in range(60):
        with_prefix = known.with_prefix(prompt(), REPLICAS)
        name = min(with_prefix or REPLICAS, key=lambda each: counts[each])
        known.began(prompt(), name)
        counts[name] += 1
    assert max(counts.values()) <= 25, "one and a quarter of the mean"
    assert sum(counts.values()) == 60


def test_sessions_that_have_ended_leave_their_place_and_what_they_computed():
    known = Affinity()
    for _ in range(3):
        known.began(prompt(), "a")
    assert known.with_prefix(prompt(), ("a", "b")) == set()
    for _ in range(3):
        known.ended("a")
    assert known.with_prefix(prompt(), ("a", "b")) == {"a"}


def test_memory_is_bounded_and_forgets_what_was_not_used_for_longest(monkeypatch):
    monkeypatch.setattr(affinity, "MAX_REMEMBERED", 3)
    known = Affinity()
    prompts = [prefix_hashes([n] * STRIDE_TOKENS) for n in range(4)]
    for n in (0, 1, 2, 0, 3):
        known.began(prompts[n], "a")
        known.ended("a")
    assert [bool(known.with_prefix(each, ("a",))) for each in prompts] == [True, False, True, True]


@pytest.mark.parametrize("name", ["a", "never seen"])
def test_an_end_that_nobody_has_seen_the_beginning_of_changes_nothing(name):
    known = Affinity()
    known.ended(name)
    known.began(prompt(), "a")
    assert known.with_prefix(prompt(), ("a",)) == {"a"}
